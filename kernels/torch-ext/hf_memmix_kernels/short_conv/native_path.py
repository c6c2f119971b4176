"""The native path, for a CPU: one token of one convolution, or of all convolutions of a layer, by native.cpp."""

import ctypes
import math

import torch
from torch import Tensor

from .._native import INTEGER, POINTER, REAL, address, changed, function, pages_of
from .arguments import Heads, Token

STEP = (*[POINTER] * 5, INTEGER, POINTER, *[INTEGER] * 4, REAL, INTEGER)
HEADS = (*[POINTER] * 7, INTEGER, POINTER, POINTER, INTEGER, POINTER, *[INTEGER] * 3, REAL, INTEGER)


def runs_native_step(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor) -> bool:
    """Whether native code can run the step: all tensors have one dtype."""
    return x.dtype == weight.dtype == state.dtype and (bias is None or bias.dtype == x.dtype)


def short_conv_step_native(library: ctypes.CDLL, token: Token) -> Tensor:
    """Read one token [B, 1, C] and shift the state [B, C, K-1], or its pages, in place."""
    x, weight, bias, state, state_indices, silu, limit = token
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


def heads_native(library: ctypes.CDLL, arguments: Heads) -> list[Tensor]:
    """The outputs [B, 1, C], see `op.unit_heads_after_convolutions`; the states are shifted in place."""
    x, weights, states, head_dims, cos, sin, eps, silu, state_indices = arguments
    if cos is not None:
        cos, sin = cos.contiguous(), sin.contiguous()
    x, weights = [t.contiguous() for t in x], [t.contiguous() for t in weights]
    outputs, count = [torch.empty_like(t) for t in x], len(x)
    pointers, integers = POINTER * count, INTEGER * count
    pages = pages_of(state_indices, min(map(len, states)))
    function(library, "short_conv_heads", HEADS)(
        *(pointers(*[t.data_ptr() for t in tensors]) for tensors in (x, weights, states, outputs)),
        integers(*[t.shape[-1] for t in x]), integers(*[t.stride(0) for t in states]),
        integers(*head_dims), count, address(cos), address(sin),
        0 if cos is None else cos.shape[-1], address(pages), x[0].shape[0], weights[0].shape[1], silu, eps,
        x[0].dtype == torch.bfloat16,
    )  # fmt: skip
    changed(*states)
    return outputs
