"""Keeps messages of torchao and bitsandbytes from standard error, which a user need not do anything about.

transformers imports both if they are installed. torchao then warns of each of its libraries that this machine cannot
load. Its wheel holds libraries for CUDA, which a build of PyTorch without CUDA never loads. hf_memmix quantises by
torchao's functions in plain PyTorch, which need no such library. PyTorch warns of a call in torchao's own code that a
later release of PyTorch will refuse. bitsandbytes asks on some processors for a package with one faster function, also
in runs that quantise nothing. All other messages, and torchao's first one on a build with CUDA, are shown as before.
"""

import logging

import torch

_FASTER = "bitsandbytes.backends.cpu.ops"


def is_wanted(record: logging.LogRecord) -> bool:
    """Whether a message of these loggers is shown; a filter of `logging`."""
    message = record.getMessage()
    cannot_load = message.startswith("Failed to load ")
    unused = record.name == _FASTER or record.name == "torchao" and torch.version.cuda is None
    own_enums = "<enum 'KernelPreference'>" in message or "<enum 'ScaleCalculationMode'>" in message
    return not (cannot_load and unused) and not (own_enums and "register_constant()" in message)


for _name in ("torchao", "torch.utils._pytree", _FASTER):
    logging.getLogger(_name).addFilter(is_wanted)
