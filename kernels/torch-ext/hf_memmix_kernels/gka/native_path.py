"""The native path, for a CPU: forward, backward, the decode step, its gates and a layer around it, by native.cpp."""

import ctypes
import functools
import struct

import torch
from torch import Tensor

from .._layer_step import NativeLayer
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
    zeros,
)
from .arguments import Gates, Inputs, Solver, States, Upstream
from .schedule import gradient_phases, richardson_steps

TOKENS = (*[POINTER] * 9, INTEGER, INTEGER, *[POINTER] * 5, *[INTEGER] * 5, REAL, REAL, INTEGER, INTEGER)
GRADIENTS = (*[POINTER] * 23, *[INTEGER] * 5, REAL, REAL, INTEGER, INTEGER)
GATES = (*[POINTER] * 6, *[INTEGER] * 3, REAL, INTEGER)
FIELDS = struct.Struct("12P2q3f")


@functools.cache
def _schedule(phases: tuple[int, ...], ridge: float) -> tuple[Tensor, Tensor]:
    """The steps tau of all phases, and how many each phase has."""
    steps = [richardson_steps(count, ridge) for count in phases]
    flat = torch.tensor([tau for phase in steps for tau in phase], dtype=torch.float32, device="cpu")
    return flat, torch.tensor([len(phase) for phase in steps], device="cpu")


def _advance(library, inputs: Inputs, states: States, pages, starts, solver: Solver, outputs: tuple):
    """Advance the states in place over all tokens, and write the outputs (o, x), see native.cpp."""
    q, k, v, log_decay, alpha, beta = map(dense, inputs)
    (h, u), (o, x), (phases, ridge, scale) = states, outputs, solver
    (_, _, heads, dim), values = q.shape, 0 if v is None else v.shape[-1]
    steps, counts = _schedule(tuple(phases), ridge)
    call = function(library, "gka_tokens", TOKENS)
    arguments = (
        q.data_ptr(), k.data_ptr(), address(v), log_decay.data_ptr(), address(alpha), address(beta), h.data_ptr(),
        address(u), address(pages), h.stride(0), 0 if u is None else u.stride(0), address(o), address(x),
        starts.data_ptr(), steps.data_ptr(), counts.data_ptr(), counts.numel(), heads, k.shape[2], dim, values, ridge,
        scale,
    )  # fmt: skip
    over_rows(functools.partial(call, *arguments), (starts.numel() - 1) * heads, 2.0 * steps.numel() * q.numel() * dim)


def gka_forward_native(
    library: ctypes.CDLL, inputs: Inputs, states: States, cu_seqlens: Tensor | None, solver: Solver
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """o [B, T, H, Dv] in q's dtype, x [B, T, H, D] in float32, the final H and U."""
    q, _, v, *_ = inputs
    h, u = (s.clone(memory_format=torch.contiguous_format) for s in states)
    o, x = (empty(*q.shape[:3], t.shape[-1]) for t in (v, q))
    starts = starts_of(*q.shape[:2], cu_seqlens)
    if cu_seqlens is not None:  # tokens of no sequence
        o.zero_(), x.zero_()
    _advance(library, inputs, (h, u), None, starts, solver, (o, x))
    return o.to(q.dtype), x, h, u


def gka_backward_native(
    library: ctypes.CDLL, upstream: Upstream, inputs: Inputs, states: States, x: Tensor, cu_seqlens, solver: Solver
) -> tuple[Tensor, ...]:
    """Gradients as `torch_path.gka_backward`."""
    (q, k, v, *_), (phases, ridge, scale) = inputs, solver
    dtypes, (batch, length, heads, dim), values = (q.dtype, k.dtype, v.dtype), q.shape, v.shape[-1]
    kv_heads = k.shape[2]
    given = [dense(t) for t in (*upstream, *inputs, *states, x)]
    new = empty if cu_seqlens is None else zeros  # tokens of no sequence have no gradient
    dq, dk, dv = (new(batch, length, heads, width) for width in (dim, dim, values))
    gates = [new(batch, length, heads) for _ in range(3)]
    dh0, du0 = torch.empty_like(given[9]), torch.empty_like(given[10])
    starts, (steps, counts) = starts_of(batch, length, cu_seqlens), _schedule(gradient_phases(phases), ridge)
    tensors = (*given, dq, dk, dv, *gates, dh0, du0, starts, steps, counts)
    call = functools.partial(
        function(library, "gka_gradients", GRADIENTS), *[t.data_ptr() for t in tensors], counts.numel(), heads,
        kv_heads, dim, values, ridge, scale,
    )  # fmt: skip
    over_rows(call, (starts.numel() - 1) * heads, 2.0 * (steps.numel() + 10) * q.numel() * dim)
    if kv_heads != heads:
        dk, dv = (t.unflatten(2, (kv_heads, -1)).sum(3) for t in (dk, dv))
    dg, dalpha, dbeta = gates
    dq, dk, dv = (t.to(dtype) for t, dtype in zip((dq, dk, dv), dtypes, strict=True))
    return dq, dk, dv, dg, dalpha, dbeta, dh0, du0


def gka_step_native(
    library: ctypes.CDLL, inputs: Inputs, states: States, state_indices: Tensor | None, solver: Solver
) -> Tensor:
    """Advance the states, or their pages, in place by the one token of q, k, v [B, 1, heads, D]; o [B, 1, H, Dv]."""
    q, v = inputs[0], inputs[2]
    o = empty(*q.shape[:3], v.shape[-1])
    starts, pages = starts_of(q.shape[0], 1, None), pages_of(state_indices, len(states[0]))
    _advance(library, inputs, states, pages, starts, solver, (o, None))
    changed(*states)
    return o if q.dtype == torch.float32 else o.to(q.dtype)


def gates_of_token_native(library: ctypes.CDLL, gates: Gates) -> tuple[Tensor, ...]:
    """log_decay, beta and alpha, float32 [B, 1, H], see `op_gates.gates_of_token`."""
    (x, *weights), biases = gates[:4], gates[4:7]
    heads, hidden = weights[0].shape
    dt_bias, A_log = dense(gates.dt_bias), dense(gates.A_log)
    results, pointers = tuple(empty(x.shape[0], 1, heads) for _ in weights), POINTER * 3
    function(library, "gka_gates", GATES)(
        x.data_ptr(), pointers(*[t.data_ptr() for t in weights]), pointers(*[address(t) for t in biases]),
        dt_bias.data_ptr(), A_log.data_ptr(), pointers(*[t.data_ptr() for t in results]),
        x.shape[0], hidden, heads, gates.beta_eps, x.dtype == torch.bfloat16,
    )  # fmt: skip
    return results


def gka_layer_native(layer: NativeLayer, gates: Gates, states: States, solver: Solver) -> Tensor:
    """See `layer.gka_layer_step`."""
    (phases, ridge, scale), (steps, counts) = solver, _schedule(tuple(solver.phases), solver.ridge)
    dt_bias, A_log = dense(gates.dt_bias), dense(gates.A_log)
    tensors = (*gates[1:7], dt_bias, A_log, *states, steps, counts)
    fields = FIELDS.pack(
        *[0 if t is None else t.data_ptr() for t in tensors], len(phases), layer.kv_heads, gates.beta_eps, ridge, scale
    )
    function(layer.library, "gka_layer", (POINTER, POINTER, INTEGER))(layer.fields, fields, layer.in_bf16)
    changed(*states)
    return layer.out
