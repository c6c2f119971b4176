"""States in pages, as servers keep them: a page holds all states of one sequence as bytes, a pool is many pages.

`carve` makes one tensor [pages, ...] per state, a view of the pool whose stride(0) is the page stride.
`MemoryMixer.step` reads and writes such views in place. The other functions copy the pages of some sequences out and
back.
"""

import math

import torch
from torch import Tensor

ALIGNMENT = 64  # bytes; kernels then load several numbers at once

States = dict[str, Tensor]
StateShapes = dict[str, tuple[tuple[int, ...], torch.dtype]]


def page_layout(shapes: StateShapes) -> tuple[dict[str, int], int]:
    """Offset of each state within a page, in bytes, and the bytes of a page; both are multiples of `ALIGNMENT`.

    `shapes`: `MemoryMixer.state_shapes(1, dtype)`.
    """
    offsets, end = {}, 0
    for name, (shape, dtype) in shapes.items():
        offsets[name] = end
        end += -(-math.prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
    return offsets, end


def carve(pool: Tensor, shapes: StateShapes) -> States:
    """Views [pages, ...] of the states in a pool.

    Args:
        pool: uint8 [pages, bytes], each page contiguous; pages may lie further apart than their bytes.
        shapes: `MemoryMixer.state_shapes(1, dtype)`.

    Raises:
        ValueError: a page is too small, or its address does not fit the dtype of a state.
    """
    offsets, needed = page_layout(shapes)
    if pool.dtype != torch.uint8 or pool.dim() != 2 or pool.shape[1] < needed or pool.stride(1) != 1:
        raise ValueError(
            f"the pool must be uint8 [pages, bytes] of contiguous pages with at least {needed} bytes, got {pool.dtype}"
            f" {tuple(pool.shape)} of strides {pool.stride()}"
        )
    widest = max(dtype.itemsize for _, dtype in shapes.values())
    if pool.data_ptr() % widest or pool.stride(0) % widest:
        raise ValueError(
            f"pages must start at multiples of {widest} bytes, the pool starts at {pool.data_ptr()} with a page stride"
            f" of {pool.stride(0)} bytes"
        )
    return {
        name: pool[:, offsets[name] : offsets[name] + math.prod(shape) * dtype.itemsize]
        .view(dtype)
        .view(-1, *shape[1:])
        for name, (shape, dtype) in shapes.items()
    }


def read_pages(pools: States, state_indices: Tensor) -> States:
    """Copies [B, ...] of the pages state_indices [B] (int32 or int64) of each state."""
    return {name: pool.index_select(0, state_indices) for name, pool in pools.items()}


def write_pages(pools: States, state_indices: Tensor, states: States):
    """Write states [B, ...] to the pages state_indices [B]. Of several rows for one page, one of them remains."""
    where = state_indices.long()
    for name, pool in pools.items():
        pool.index_copy_(0, where, states[name].to(pool.dtype))


def start_anew(states: States, starts_anew: Tensor, initial: States) -> States:
    """States [N, ...] with `initial` [1 or N, ...] where starts_anew [N] is true, whatever the states hold there."""
    return {
        name: torch.where(starts_anew.view(-1, *[1] * (state.dim() - 1)), initial[name].to(state.dtype), state)
        for name, state in states.items()
    }
