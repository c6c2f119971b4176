"""States of a decode step in pages of a pool: checks of the arguments, and copies for the torch paths.

A server keeps all states of one sequence as bytes in one page of a pool. Each state is then a view [pages, ...] whose
stride(0), the page stride, is larger than the state, and whose pages are contiguous. Row b of a step reads and writes
page state_indices[b]. The Triton kernels do so in place (_page_offset.py).
"""

import math

import torch
from torch import Tensor


def check_step_states(
    op: str,
    states: tuple[Tensor, ...],
    shapes: tuple[tuple[int, ...], ...],
    state_indices: Tensor | None,
    any_stride: bool = False,
) -> None:
    """Raise ValueError unless a decode step may update `states` in place.

    Values of `state_indices` are not checked, because that would wait for the device.

    Args:
        op: the name of the step, for messages.
        states: contiguous tensors [B, ...]; with `state_indices` pools [pages, ...], each page contiguous.
        shapes: the shapes [B, ...] of a batch's states.
        state_indices: int32 or int64 [B], or None.
        any_stride: whether states without `state_indices` may have any strides.
    """
    if state_indices is None:
        if tuple(tuple(s.shape) for s in states) != shapes:
            raise ValueError(f"{op}: the state must be {_listed(shapes)}, got {_listed(s.shape for s in states)}")
        if not (any_stride or all(s.is_contiguous() for s in states)):
            raise ValueError(f"{op} updates its state in place: pass contiguous tensors, e.g. by .contiguous()")
        return
    batch, device = shapes[0][0], states[0].device
    if (
        state_indices.dtype not in (torch.int32, torch.int64)
        or tuple(state_indices.shape) != (batch,)
        or state_indices.device != device
        or not state_indices.is_contiguous()
    ):
        raise ValueError(
            f"{op}: state_indices must be a contiguous int32 or int64 tensor [B] = [{batch}] on {device}, got"
            f" {state_indices.dtype} {list(state_indices.shape)} on {state_indices.device}"
        )
    for state, (_, *page) in zip(states, shapes, strict=True):
        if list(state.shape[1:]) != page:
            raise ValueError(f"{op}: with state_indices the state must be [pages, *{page}], got {list(state.shape)}")
        if state.stride()[1:] != _contiguous_strides(page) or state.stride(0) < math.prod(page):
            raise ValueError(
                f"{op}: with state_indices each page of the state [pages, *{page}] must be contiguous and apart from"
                f" the next, got strides {state.stride()}"
            )


def read_pages(state_indices: Tensor | None, *pools: Tensor) -> tuple[Tensor, ...]:
    """Copies [B, ...] of the pages of a batch; the tensors themselves without `state_indices`."""
    return pools if state_indices is None else tuple(pool.index_select(0, state_indices) for pool in pools)


def write_pages(state_indices: Tensor | None, pools: tuple[Tensor, ...], rows: tuple[Tensor, ...]) -> None:
    """Put what `read_pages` copied back into the pages. Of several rows for one page, one of them remains."""
    if state_indices is not None:
        where = state_indices.long()
        for pool, row in zip(pools, rows, strict=True):
            pool.index_copy_(0, where, row)


def _contiguous_strides(shape: list[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def _listed(shapes) -> str:
    return " and ".join(str(tuple(shape)) for shape in shapes)
