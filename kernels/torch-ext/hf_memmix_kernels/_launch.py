"""Helpers that the launch modules of several ops share. Imports Triton, so only launch modules may import it."""

import torch
import triton.language as tl
from torch import Tensor

from ._player import ALIGNED


def accumulator(dtype: torch.dtype) -> tl.dtype:
    """The dtype in which a kernel sums for inputs of `dtype`: float64 for float64, else float32."""
    return tl.float64 if dtype == torch.float64 else tl.float32


def contiguous(*tensors: Tensor | None) -> list[Tensor | None]:
    """The tensors with contiguous memory, which the kernels assume; None stays None."""
    return [None if t is None else t.contiguous() for t in tensors]


def by_rows(x: Tensor) -> tuple[Tensor, int]:
    """x [B, T, ...] and the number of elements from one token to the next. The features of a token are contiguous.

    A slice of a wider tensor, for example of a fused projection, needs no copy.
    """
    width, dense, stride = 1, True, x.stride()
    for size, step in zip(x.shape[:1:-1], stride[:1:-1], strict=True):
        dense = dense and (step == width or size == 1)
        width *= size
    if dense:
        # a token's stride is free if there is one token per row; a row's stride if there is one row
        (rows, tokens), (row, token) = x.shape[:2], stride[:2]
        if rows == 1 or row == token * tokens:
            return x, token
        if tokens == 1:
            return x, row
    return x.contiguous(), width


def aligned(x: Tensor) -> Tensor:
    """x with contiguous memory that begins at a multiple of `ALIGNED` bytes; a copy only where x differs.

    Triton compiles other code for other addresses. This is for kernels of which ptxas miscompiles that code
    (kernels/README.md, "Traps"). A tape may ask it, because the alignment of tensors is part of its form.
    """
    x = x.contiguous()
    return x.clone() if x.data_ptr() % ALIGNED else x


def aligned_rows(x: Tensor) -> tuple[Tensor, int]:
    """As `by_rows`, but with an aligned address, and a stride that is a multiple of 16 if a token's size is one."""
    rows, stride = by_rows(x)
    width = x[0, 0].numel()
    if rows.data_ptr() % ALIGNED or (stride % 16 and not width % 16):
        return aligned(x), width
    return rows, stride


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up. Triton's own function of this name costs microseconds per call on the host."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n >= 1. Triton's own function costs microseconds per call."""
    return 1 << (n - 1).bit_length()


def page_strides(state_indices: Tensor | None, *states: Tensor) -> list[int | None]:
    """Elements between two pages of each state. Without pages each entry is None, as the kernels expect."""
    return [None if state_indices is None else state.stride(0) for state in states]
