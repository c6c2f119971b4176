"""Keeps two messages of torchao from standard error, which a user can do nothing about.

transformers imports torchao if it is installed. torchao then warns of each of its libraries that this machine cannot
load. Its wheel holds libraries for CUDA, which a build of PyTorch without CUDA never loads. hf_memmix quantises by
torchao's functions in plain PyTorch, which need no such library. PyTorch warns of a call in torchao's own code that a
later release of PyTorch will refuse. All other messages, and the first one on a build with CUDA, are shown as before.
"""

import logging

import torch


def is_wanted(record: logging.LogRecord) -> bool:
    """Whether a message of torchao's loggers is shown; a filter of `logging`."""
    message = record.getMessage()
    cannot_load = record.name == "torchao" and message.startswith("Failed to load ") and torch.version.cuda is None
    own_enums = "<enum 'KernelPreference'>" in message or "<enum 'ScaleCalculationMode'>" in message
    return not cannot_load and not (own_enums and "register_constant()" in message)


for _name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_name).addFilter(is_wanted)
