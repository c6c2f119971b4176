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


def page_strides(state_indices: Tensor | None, *states: Tensor) -> list[int | None]:
    """Elements between two pages of each state; None, as the kernels expect it, where there are no pages."""
    return [None if state_indices is None else state.stride(0) for state in states]
