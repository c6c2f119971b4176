"""The native path, for a CPU: the decode step, alone and with the layer around it, by native.cpp."""

import ctypes
import functools

import torch
from torch import Tensor

from .._layer_step import NativeLayer
from .._native import INTEGER, POINTER, REAL, address, changed, dense, function, over_rows, pages_of
from .arguments import Sizes, States, Tokens

FIELDS = ("q", "k", "v", "sink_logits", "keys", "values", "seen", "pages", "o")
SIZES = ("keys_step", "values_step", "seen_step", "heads", "kv_heads", "D", "window", "sinks")


class _Ring(ctypes.Structure):
    _fields_ = (
        *[(name, POINTER) for name in FIELDS], *[(name, INTEGER) for name in SIZES],
        ("scale", REAL), ("softcap", REAL),
    )  # fmt: skip


def runs_native(x: Tokens, states: States) -> bool:
    """Whether native code can run: tokens and states have one dtype."""
    dtype = x.q.dtype
    return dtype == x.k.dtype == x.v.dtype == states.keys.dtype == states.values.dtype


def window_step_native(library: ctypes.CDLL, x: Tokens, states: States, sizes: Sizes) -> Tensor:
    """As `torch_path.window_step_torch`."""
    q, k, v = [t.contiguous() for t in x]
    (sink_logits, keys, values, seen, state_indices), (window, sinks, scale, softcap) = states, sizes
    sink_logits, pages, o = dense(sink_logits), pages_of(state_indices, len(keys)), torch.empty_like(q)
    (batch, _, heads, dim), kv_heads = q.shape, k.shape[2]
    ring = _Ring(
        q.data_ptr(), k.data_ptr(), v.data_ptr(), address(sink_logits), keys.data_ptr(), values.data_ptr(),
        seen.data_ptr(), address(pages), o.data_ptr(), keys.stride(0), values.stride(0), seen.stride(0), heads,
        kv_heads, dim, window, sinks, scale, softcap or 0.0,
    )  # fmt: skip
    call = functools.partial(
        function(library, "window_step", (POINTER, *[INTEGER] * 3)), ctypes.byref(ring), q.dtype == torch.bfloat16
    )
    over_rows(call, batch * kv_heads, 4.0 * q.numel() * (window + sinks))
    changed(keys, values, seen)
    return o


def window_layer_native(layer: NativeLayer, states: States, sizes: Sizes) -> Tensor:
    """See `layer.window_layer_step`."""
    (sink_logits, keys, values, seen, _), (window, sinks, scale, softcap) = states, sizes
    sink_logits = dense(sink_logits)
    ring = _Ring(
        None, None, None, address(sink_logits), keys.data_ptr(), values.data_ptr(), seen.data_ptr(), None, None,
        0, 0, 0, layer.heads, layer.kv_heads, keys.shape[-1], window, sinks, scale, softcap or 0.0,
    )  # fmt: skip
    call = function(layer.library, "window_layer", (POINTER, POINTER, INTEGER))
    call(layer.fields, ctypes.byref(ring), layer.in_bf16)
    changed(keys, values, seen)
    return layer.out
