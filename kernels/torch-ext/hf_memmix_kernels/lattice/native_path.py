"""The native path, for a CPU: forward, backward, the decode step and a layer around it, by native.cpp.

For slots of unit norm, without l1.
"""

import ctypes
import struct

import torch
from torch import Tensor

from .._layer_step import NativeLayer
from .._native import INTEGER, POINTER, address, changed, dense, function, over_rows, pages_of, starts_of
from .arguments import Gates, Inputs, Pages, Start, Upstream
from .sizes import CHECKPOINT, STRONGEST_DECAY

VARIANTS = ("dec", "enc", "sim")  # in the order of native.cpp
TOKENS = (*[POINTER] * 6, INTEGER, *[POINTER] * 3, *[INTEGER] * 7)
ADJOINT = (*[POINTER] * 12, *[INTEGER] * 7)
FIELDS = struct.Struct("5P4q4f")


def runs_native(log_decay: Tensor | None, variant: str, project: bool, l1: float) -> bool:
    """Whether native code computes this rule."""
    return log_decay is None and variant in VARIANTS and project and not l1


def _advance(library, inputs: Inputs, state: Tensor, pages, stride: int, kept, starts, variant: str) -> Tensor:
    """y of all tokens; `state`, contiguous or pages, is advanced in place."""
    q, k, v, gamma = (dense(t) for t in inputs[:4])
    (_, _, heads, m), d = q.shape, v.shape[-1]
    # zeros for packed tokens that belong to no sequence
    y, rows = torch.zeros_like(v), (starts.numel() - 1) * heads
    call = function(library, "lattice_tokens", TOKENS)
    tensors = (q, k, v, gamma, state, pages)
    addresses = [address(t) for t in tensors]

    def part(first, last):
        call(
            *addresses, stride, y.data_ptr(), address(kept), starts.data_ptr(), heads, d, m, VARIANTS.index(variant),
            rows, first, last,
        )  # fmt: skip

    over_rows(part, rows, 8.0 * y.numel() * m)
    return y


def lattice_fwd_native(library: ctypes.CDLL, inputs: Inputs, start: Start, variant: str, save: bool):
    """o, the final state [N, H, d, m] and the states before every 64th token [windows, N H, m, d]."""
    (q, _, v, *_), (initial_state, cu_seqlens) = inputs, start
    state = initial_state.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    starts, (sequences, heads, d, m) = starts_of(*q.shape[:2], cu_seqlens), state.shape
    longest = int(starts.diff().max()) if sequences else 0
    kept = state.new_zeros(-(-longest // CHECKPOINT) if save else 0, sequences * heads, m, d)
    y = _advance(library, inputs, state, None, heads * d * m, kept if save else None, starts, variant)
    return y.to(v.dtype), state, kept


def lattice_bwd_native(library: ctypes.CDLL, upstream: Upstream, inputs: Inputs, kept: Tensor, cu_seqlens, variant):
    """Gradients of q, k, v, gamma and the initial state."""
    (do, dfinal), (q, k, v, gamma, _) = upstream, inputs
    dstate = dfinal.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    likes, starts = (q, k, v, gamma), starts_of(*q.shape[:2], cu_seqlens)
    q, k, v, gamma, do = (dense(t) for t in (*likes, do))
    grads = [torch.zeros_like(t) for t in (q, k, v, gamma)]
    (_, _, heads, m), d = q.shape, v.shape[-1]
    rows = (starts.numel() - 1) * heads
    call = function(library, "lattice_adjoint", ADJOINT)
    addresses = [t.data_ptr() for t in (do, dstate, q, k, v, gamma, kept, *grads, starts)]

    def part(first, last):
        call(*addresses, heads, d, m, VARIANTS.index(variant), rows, first, last)

    over_rows(part, rows, 30.0 * v.numel() * m)
    return *(grad.to(like.dtype) for grad, like in zip(grads, likes, strict=True)), dstate


def lattice_step_native(library: ctypes.CDLL, inputs: Inputs, pages: Pages, variant: str) -> Tensor:
    """Update the state [B, H, d, m], or its pages, in place by one token; returns o [B, 1, H, d]."""
    state, state_indices = pages
    pages, starts = pages_of(state_indices, len(state)), starts_of(inputs.q.shape[0], 1, None)
    y = _advance(library, inputs, state, pages, state.stride(0), None, starts, variant)
    changed(state)
    return y.to(inputs.v.dtype)


def lattice_layer_native(layer: NativeLayer, gates: Gates, state: Tensor, variant: str) -> Tensor:
    """See `layer.lattice_layer_step`."""
    weights, biases, softplus, largest, enc_step, unit_eps = gates
    fields = FIELDS.pack(
        *[address(t) or 0 for t in (*weights, *biases, state)], layer.kv_heads, VARIANTS.index(variant), softplus,
        weights[1] is not None, largest, enc_step, -STRONGEST_DECAY, unit_eps,
    )  # fmt: skip
    function(layer.library, "lattice_layer", (POINTER, POINTER, INTEGER))(layer.fields, fields, layer.in_bf16)
    changed(state)
    return layer.out
