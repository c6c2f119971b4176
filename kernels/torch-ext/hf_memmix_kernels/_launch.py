"""Helpers that the launch modules of several ops share. Imports Triton, so only launch modules may import it."""

import torch
import triton.language as tl
from torch import Tensor


def accumulator(dtype: torch.dtype) -> tl.dtype:
    """The dtype in which a kernel sums for inputs of `dtype`: float64 for float64, else float32."""
    return tl.float64 if dtype == torch.float64 else tl.float32


def contiguous(*tensors: Tensor | None) -> list[Tensor | None]:
    """The tensors with contiguous memory, which the kernels assume; None stays None."""
    return [None if t is None else t.contiguous() for t in tensors]


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up. Triton's own function of this name costs microseconds per call on the host."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n >= 1. Triton's own function costs microseconds per call."""
    return 1 << (n - 1).bit_length()


def page_strides(state_indices: Tensor | None, *states: Tensor) -> list[int | None]:
    """Elements between two pages of each state. Without pages each entry is None, as the kernels expect."""
    return [None if state_indices is None else state.stride(0) for state in states]
