"""The native path, for a CPU: sequences, their gradient, and one token of one convolution, or of all convolutions of a
layer, by native.cpp."""

import ctypes
import functools
import math

import torch
from torch import Tensor

from .._native import (
    INTEGER,
    POINTER,
    REAL,
    address,
    changed,
    dense,
    empty,
    function,
    over_rows,
    pages_of,
    starts_of,
)
from .arguments import Heads, Inputs, Token, Upstream

STEP = (*[POINTER] * 5, INTEGER, POINTER, *[INTEGER] * 4, REAL, INTEGER)
SEQUENCES = (POINTER, INTEGER, *[POINTER] * 7, *[INTEGER] * 4, REAL, *[INTEGER] * 3)
GRADIENTS = (*[POINTER] * 3, INTEGER, *[POINTER] * 9, *[INTEGER] * 4, REAL, *[INTEGER] * 3)
HEADS = (*[POINTER] * 7, INTEGER, POINTER, POINTER, INTEGER, POINTER, *[INTEGER] * 3, REAL, INTEGER)


def runs_native(x: Tensor, *others: Tensor | None) -> bool:
    """Whether native code can run: x, weight, bias and state have one dtype."""
    return all(t is None or t.dtype == x.dtype for t in others)


def _sequences(a: Inputs) -> tuple[tuple, tuple]:
    """x with its rows' stride, and the other tensors of the inputs; where the sequences lie, and the options."""
    x, weight, bias, initial, cu_seqlens, lengths, silu, limit = a
    batch, tokens, channels = x.shape
    stride = x.stride(1)
    if x.stride(2) != 1 or (batch > 1 and x.stride(0) != tokens * stride):
        x, stride = x.contiguous(), channels  # a dimension of size 1 may keep any stride
    starts = starts_of(batch, tokens, cu_seqlens)
    starts, ends = starts[:-1], starts[1:]
    if lengths is not None:
        ends = starts + lengths.to("cpu", torch.int64).clamp(0, tokens)
    tensors = (x, stride, *(dense(t, x.dtype) for t in (weight, bias, initial)))
    limit = math.inf if limit is None else limit
    return tensors, (starts, ends, len(starts), *weight.shape, silu, limit, x.dtype == torch.bfloat16)


def _call(library: ctypes.CDLL, name: str, types: tuple, arguments: tuple, x: Tensor, work: float) -> None:
    """Call a function for all channels of x in several threads."""
    given = [address(a) if a is None or isinstance(a, Tensor) else a for a in arguments]
    over_rows(functools.partial(function(library, name, types), *given), x.shape[2], work * x.numel())


def short_conv_fwd_native(library: ctypes.CDLL, a: Inputs) -> tuple[Tensor, Tensor]:
    """As `torch_path.short_conv_fwd_torch`."""
    tensors, layout = _sequences(a)
    shape, whole = a.x.shape, a.cu_seqlens is None and a.lengths is None
    y = (torch.empty if whole else torch.zeros)(shape, dtype=a.x.dtype, device="cpu")  # tokens of no sequence: 0
    final = torch.empty(layout[2], shape[2], a.weight.shape[1] - 1, dtype=a.x.dtype, device="cpu")
    _call(library, "short_conv_sequences", SEQUENCES, (*tensors, y, final, *layout), a.x, 2 * a.weight.shape[1] + 15)
    return y, final


def short_conv_bwd_native(library: ctypes.CDLL, upstream: Upstream, a: Inputs) -> tuple[Tensor, ...]:
    """As `torch_path.short_conv_bwd_torch`."""
    tensors, layout = _sequences(a)
    dy, dfinal = (dense(t, a.x.dtype) for t in upstream)
    dx, dinitial = torch.zeros_like(dy), torch.empty_like(dfinal)
    dweight, dbias = empty(*a.weight.shape), empty(a.weight.shape[0])
    arguments = (dy, dfinal, *tensors, dx, dinitial, dweight, dbias, *layout)
    _call(library, "short_conv_gradients", GRADIENTS, arguments, a.x, 6 * a.weight.shape[1] + 20)
    return dx, dweight, dbias, dinitial


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
