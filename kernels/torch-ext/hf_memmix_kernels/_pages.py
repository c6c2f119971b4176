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
    tokens: int,
    states: tuple[Tensor, ...],
    shapes: tuple[tuple[int, ...], ...],
    state_indices: Tensor | None,
    any_stride: bool = False,
) -> None:
    """Raise ValueError unless a decode step reads one token and may update `states` in place.

    Values of `state_indices` are not checked, because that would wait for the device.

    Args:
        op: the name of the step, for messages.
        tokens: how many tokens each row has.
        states: contiguous tensors [B, ...]; with `state_indices` pools [pages, ...], each page contiguous.
        shapes: the shapes [B, ...] of a batch's states.
        state_indices: int32 or int64 [B], or None.
        any_stride: whether states without `state_indices` may have any strides.
    """
    if tokens != 1:
        raise ValueError(f"{op} advances by one token, got {tokens}; use the function of whole sequences for several")
    if state_indices is not None:
        _check_pages(op, states, shapes, state_indices)
        return
    if len(states) != len(shapes):
        raise ValueError(f"{op}: the state must be {len(shapes)} tensors, got {len(states)}")
    for state, shape in zip(states, shapes, strict=True):
        if state.shape != shape:
            raise ValueError(f"{op}: the state must be {_listed(shapes)}, got {_listed(s.shape for s in states)}")
        if not (any_stride or state.is_contiguous()):
            raise ValueError(f"{op} updates its state in place: pass contiguous tensors, e.g. by .contiguous()")


def _check_pages(
    op: str, states: tuple[Tensor, ...], shapes: tuple[tuple[int, ...], ...], state_indices: Tensor
) -> None:
    """`check_step_states` with `state_indices`."""
    batch, device = shapes[0][0], states[0].device
    if (
        state_indices.dtype not in (torch.int32, torch.int64)
        or state_indices.shape != (batch,)
        or state_indices.device != device
        or not state_indices.is_contiguous()
    ):
        raise ValueError(
            f"{op}: state_indices must be a contiguous int32 or int64 tensor [B] = [{batch}] on {device}, got"
            f" {state_indices.dtype} {list(state_indices.shape)} on {state_indices.device}"
        )
    for state, shape in zip(states, shapes, strict=True):
        page = shape[1:]
        if state.shape[1:] != page:
            raise ValueError(f"{op}: with state_indices the state must be {_paged(page)}, got {list(state.shape)}")
        stride, *strides = state.stride()
        elements = 1
        for size, step in zip(reversed(page), reversed(strides), strict=True):
            if step != elements and size != 1:
                elements = math.inf  # the page is not contiguous
            elements *= size
        if stride < elements:
            raise ValueError(
                f"{op}: with state_indices each page of the state {_paged(page)} must be contiguous, and apart from"
                f" the next page, got strides {state.stride()}"
            )


def read_pages(state_indices: Tensor | None, *pools: Tensor) -> tuple[Tensor, ...]:
    """Copies [B, ...] of the pages of a batch; the tensors themselves without `state_indices`."""
    return pools if state_indices is None else tuple(pool.index_select(0, state_indices) for pool in pools)


def write_pages(state_indices: Tensor | None, pools: tuple[Tensor, ...], rows: tuple[Tensor, ...]) -> None:
    """Copy `rows` into the pages that `read_pages` copied from. If several rows have the same page, one of them is
    kept.
    """
    if state_indices is not None:
        where = state_indices.long()
        for pool, row in zip(pools, rows, strict=True):
            pool.index_copy_(0, where, row)


def _listed(shapes) -> str:
    return " and ".join(str(tuple(shape)) for shape in shapes)


def _paged(page: tuple[int, ...]) -> str:
    return f"[pages, {', '.join(map(str, page))}]"
