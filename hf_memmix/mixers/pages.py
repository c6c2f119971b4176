"""States in pages, as servers keep them. A page holds all states of one sequence as bytes; a pool consists of pages.

`carve` makes one tensor [pages, ...] per state, a view of the pool whose stride(0) is the page stride.
`MemoryMixer.step` reads and writes such views in place. The other functions copy states from pages and to pages.
"""

import math

import torch
from torch import Tensor

from ..errors import UserError

ALIGNMENT = 64  # bytes; with aligned states, one load instruction of a kernel reads several elements

States = dict[str, Tensor]
StateShapes = dict[str, tuple[tuple[int, ...], torch.dtype]]


def page_layout(shapes: StateShapes) -> tuple[dict[str, int], int]:
    """The offset of each state within a page and the size of a page, both in bytes and multiples of `ALIGNMENT`.

    Args:
        shapes: `MemoryMixer.state_shapes(1, dtype)`.
    """
    offsets, end = {}, 0
    for name, (shape, dtype) in shapes.items():
        offsets[name] = end
        end += -(-math.prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
    return offsets, end


def carve(pool: Tensor, shapes: StateShapes) -> States:
    """Views [pages, ...] of the states in a pool.

    Args:
        pool: uint8 [pages, bytes]. Each page is contiguous; there may be other bytes between two pages.
        shapes: `MemoryMixer.state_shapes(1, dtype)`.

    Raises:
        ValueError: a page is too small, or its address is not a multiple of the largest element size of the states.
    """
    offsets, needed = page_layout(shapes)
    if pool.dtype != torch.uint8 or pool.dim() != 2 or pool.shape[1] < needed or pool.stride(1) != 1:
        raise UserError(
            f"the pool must be uint8 [pages, bytes] of contiguous pages with at least {needed} bytes, got {pool.dtype}"
            f" {tuple(pool.shape)} of strides {pool.stride()}"
        )
    widest = max(dtype.itemsize for _, dtype in shapes.values())
    if pool.data_ptr() % widest or pool.stride(0) % widest:
        raise UserError(
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
    """Write states [B, ...] to the pages state_indices [B]. If several rows have the same page, one of them
    is kept.
    """
    where = state_indices.long()
    for name, pool in pools.items():
        pool.index_copy_(0, where, states[name].to(pool.dtype))


def start_anew(states: States, starts_anew: Tensor, initial: States) -> States:
    """States [N, ...] in which the rows with starts_anew [N] are replaced by `initial` [1 or N, ...], even if they
    hold NaN.
    """
    return {
        name: torch.where(starts_anew.view(-1, *[1] * (state.dim() - 1)), initial[name].to(state.dtype), state)
        for name, state in states.items()
    }
