"""How a memory with a window beside it starts: the window computes the attention up to its size, the memory adds
little.
"""

import dataclasses

import torch

from hf_memmix.conversion.attention_weights import AttentionWeights, TensorFate
from hf_memmix.conversion.from_attention.registry import Start, start_of
from hf_memmix.mixers import BesideWindow

SHARE_OF_MEMORY = 0.05  # m at the start


@torch.no_grad()
def start_beside_window(mixer: BesideWindow, attention: AttentionWeights, start: Start) -> list[TensorFate]:
    """Fill both parts from an attention, in place. `start`: that of the memory.

    Returns:
        one fate for each of the attention's tensors, with the targets in both parts.
    """
    of_memory = {fate.field: fate for fate in start.take_over(mixer.memory, attention)}
    if start.lengthen is not None:
        start.lengthen(mixer.memory)
    fates = []
    for fate in start_of("window").take_over(mixer.window, attention):
        memory, targets = of_memory[fate.field], tuple(f"window.{name}" for name in fate.targets)
        kept = memory.fate == "used"
        targets += tuple(f"memory.{name}" for name in memory.targets) if kept else ()
        fates.append(dataclasses.replace(fate, targets=targets))
    mixer.m.fill_(SHARE_OF_MEMORY)
    return fates
