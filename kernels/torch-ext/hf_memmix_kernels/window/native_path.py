"""The native path, for a CPU: the decode step, alone and with the layer around it, by native.cpp."""

import ctypes
import functools

import torch
from torch import Tensor

from .._native import INTEGER, POINTER, REAL, address, changed, dense, function, over_rows, pages_of
from .arguments import Layer, Sizes, States, Tokens

FIELDS = ("q", "k", "v", "sink_logits", "keys", "values", "seen", "pages", "o")
SIZES = ("keys_step", "values_step", "seen_step", "heads", "kv_heads", "D", "window", "sinks")


class _Ring(ctypes.Structure):
    _fields_ = (
        *[(name, POINTER) for name in FIELDS], *[(name, INTEGER) for name in SIZES],
        ("scale", REAL), ("softcap", REAL),
    )  # fmt: skip


class _Layer(ctypes.Structure):
    _fields_ = (
        ("x", POINTER), ("weights", POINTER * 4), ("biases", POINTER * 4), ("norms", POINTER * 2), ("cos", POINTER),
        ("sin", POINTER), ("out", POINTER), ("hidden", INTEGER), ("width", INTEGER), ("pairs", INTEGER),
        ("eps", REAL),
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


def window_layer_native(library: ctypes.CDLL, layer: Layer, states: States, sizes: Sizes) -> Tensor:
    """See `layer.window_layer_step`."""
    (x, weights, biases, norms, cos, sin, eps), (window, sinks, scale, softcap) = layer, sizes
    (sink_logits, keys, values, seen, _), (_, _, kv_heads, dim) = states, states.keys.shape
    x, sink_logits, out = x.contiguous(), dense(sink_logits), x.new_empty(1, 1, len(weights[3]))
    pairs = 0
    if cos is not None:
        cos, sin, pairs = cos.contiguous(), sin.contiguous(), cos.shape[-1]
    given = _Layer(
        x.data_ptr(), tuple([t.data_ptr() for t in weights]), tuple([address(t) for t in biases]),
        tuple([address(t) for t in norms]), address(cos), address(sin), out.data_ptr(), x.shape[-1], len(weights[3]),
        pairs, eps,
    )  # fmt: skip
    ring = _Ring(
        None, None, None, address(sink_logits), keys.data_ptr(), values.data_ptr(), seen.data_ptr(), None, None,
        0, 0, 0, len(weights[0]) // dim, kv_heads, dim, window, sinks, scale, softcap or 0.0,
    )  # fmt: skip
    call = function(library, "window_layer", (POINTER, POINTER, INTEGER))
    call(ctypes.byref(given), ctypes.byref(ring), x.dtype == torch.bfloat16)
    changed(keys, values, seen)
    return out
