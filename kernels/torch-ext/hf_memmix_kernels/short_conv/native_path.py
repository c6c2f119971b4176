"""The native path, for a CPU: one token of one convolution, or of all convolutions of a layer, by native.cpp."""

import ctypes
import math
from typing import NamedTuple

import torch
from torch import Tensor

from .._dispatch import native_library
from .._native import INTEGER, POINTER, REAL, address, changed, function, pages_of
from .._registration import needs_op

STEP = (*[POINTER] * 5, INTEGER, POINTER, *[INTEGER] * 4, REAL, INTEGER)
HEADS = (*[POINTER] * 7, INTEGER, POINTER, POINTER, INTEGER, POINTER, *[INTEGER] * 3, REAL, INTEGER)


def runs_native_step(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor) -> bool:
    """Whether native code can run the step: all tensors have one dtype."""
    return x.dtype == weight.dtype == state.dtype and (bias is None or bias.dtype == x.dtype)


def short_conv_step_native(
    library: ctypes.CDLL,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    state_indices: Tensor | None,
    silu: bool,
    limit: float | None,
) -> Tensor:
    """Read one token [B, 1, C] and shift the state [B, C, K-1], or its pages, in place."""
    x, weight, bias = x.contiguous(), weight.contiguous(), None if bias is None else bias.contiguous()
    y, pages, (channels, taps) = torch.empty_like(x), pages_of(state_indices, len(state)), weight.shape
    target = state if pages is not None or state.is_contiguous() else state.contiguous()
    function(library, "short_conv_step", STEP)(
        x.data_ptr(), weight.data_ptr(), address(bias), target.data_ptr(), address(pages), target.stride(0),
        y.data_ptr(), x.shape[0], channels, taps, silu, math.inf if limit is None else limit,
        x.dtype == torch.bfloat16,
    )  # fmt: skip
    changed(state)
    if target is not state:
        state.copy_(target)
    return y


class Convolution(NamedTuple):
    """A convolution of `unit_heads_after_convolutions`: x [B, 1, C], weight [C, K], state [B, C, K-1] or its pages,
    and the head size D, or 0 if the output stays as it is."""

    x: Tensor
    weight: Tensor
    state: Tensor
    head_dim: int


def unit_heads_after_convolutions(
    convolutions: list[Convolution],
    cos: Tensor | None,
    sin: Tensor | None,
    eps: float,
    silu: bool,
    state_indices: Tensor | None,
) -> list[Tensor] | None:
    """One token: `short_conv_step` of each convolution, then `unit_heads` of its output, in one call of native code.

    It is faster than these functions, because a call takes longer than its arithmetic. Arguments are not checked.

    Args:
        convolutions: all with the same number of taps K.
        cos, sin: [B, 1, r] as of `unit_heads`, or None; in the dtype of x.
        eps: added to the norms.
        silu: whether the activation is SiLU or none.
        state_indices: pages of the states, int64 [B], or None.

    Returns:
        The outputs [B, 1, C], or None if native code cannot run them.
    """
    x, paged = convolutions[0].x, state_indices is not None
    tensors = [t for c in convolutions for t in c[:3]]
    # first: torch.compile would make a guard of every other condition
    if needs_op((*tensors, cos, sin)) or torch.is_grad_enabled() or not x.is_cpu:
        return None
    if cos is not None and not cos.dtype == sin.dtype == x.dtype:
        return None
    for c in convolutions:
        if (
            c.x.dtype != x.dtype
            or not runs_native_step(c.x, c.weight, None, c.state)
            or not (paged or c.state.is_contiguous())
        ):
            return None
    library = native_library("short_conv", *tensors, cos, sin)
    if library is None:
        return None
    if cos is not None:
        cos, sin = cos.contiguous(), sin.contiguous()
    inputs, weights = [c.x.contiguous() for c in convolutions], [c.weight.contiguous() for c in convolutions]
    outputs, count = [torch.empty_like(t) for t in inputs], len(convolutions)
    pointers, integers = POINTER * count, INTEGER * count
    states = [c.state for c in convolutions]
    pages = pages_of(state_indices, min(map(len, states)))
    function(library, "short_conv_heads", HEADS)(
        *(pointers(*[t.data_ptr() for t in tensors]) for tensors in (inputs, weights, states, outputs)),
        integers(*[t.shape[-1] for t in inputs]), integers(*[t.stride(0) for t in states]),
        integers(*[c.head_dim for c in convolutions]), count, address(cos), address(sin),
        0 if cos is None else cos.shape[-1], address(pages), x.shape[0], weights[0].shape[1], silu, eps,
        x.dtype == torch.bfloat16,
    )  # fmt: skip
    changed(*states)
    return outputs
