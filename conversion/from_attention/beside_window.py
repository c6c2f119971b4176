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
    of_memory = {fate.field: fate for fate in start.fill(mixer.memory, attention)}
    fates = []
    for fate in start_of("window").fill(mixer.window, attention):
        fates.append(_of_both(fate, of_memory[fate.field]))
    mixer.m.fill_(SHARE_OF_MEMORY)
    return fates


def _of_both(window: TensorFate, memory: TensorFate) -> TensorFate:
    """The fate of a tensor that the window has, and the memory, unless it drops the tensor."""
    parts = {"window": window} | ({} if memory.fate == "dropped" else {"memory": memory})
    targets = tuple(f"{name}.{path}" for name, part in parts.items() for path in part.targets)
    changed = [f"{name}: {part.reason}" for name, part in parts.items() if part.fate != "used"]
    if not changed:
        return dataclasses.replace(window, targets=targets)
    return dataclasses.replace(window, fate="transformed", targets=targets, reason="; ".join(changed))
