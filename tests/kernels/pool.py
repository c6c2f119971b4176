"""States in pages of one pool of bytes, as in a server, with gaps between them that a step must not change."""

import math

import torch
from torch import Tensor

# 255 in every byte is NaN in each floating point format
DIRT = 255


class Pool:
    """Pages that each hold a copy of some states, with gaps between the states; all other bytes are `DIRT`.

    Attributes:
        memory: uint8 [pages, bytes of a page and of the gap after it].
        states: views [pages, ...] of the states, whose stride(0) is larger than a state.
    """

    def __init__(self, states: tuple[Tensor, ...], indices: list[int], pages: int, gap: int):
        """Copy row b of `states` [B, ...] to page indices[b], with `gap` bytes before, between and after
        the states.
        """
        starts, end = [], gap
        for state in states:
            starts.append(end)
            end += state[0].numel() * state.element_size() + gap
        self.memory = torch.full((pages, end), DIRT, dtype=torch.uint8, device=states[0].device)
        self.places = [(s.dtype, s.shape[1:], start) for s, start in zip(states, starts, strict=True)]
        self.states = self.carve(self.memory)
        for pool, state in zip(self.states, states, strict=True):
            pool[indices] = state

    def carve(self, memory: Tensor) -> tuple[Tensor, ...]:
        return tuple(
            memory[:, start : start + math.prod(shape) * dtype.itemsize].view(dtype).unflatten(1, shape)
            for dtype, shape, start in self.places
        )

    def outside(self, used: list[int]) -> Tensor:
        """A copy of the memory in which the states of the `used` pages are zero."""
        rest = self.memory.clone()
        for state in self.carve(rest):
            state[used] = 0
        return rest
