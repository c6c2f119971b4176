"""The native path of ops with one matrix per head: sequences, their gradients and one token, by matrix_memory.h."""

import ctypes
import functools

import torch
from torch import Tensor

from ._dispatch import native_library
from ._native import (
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

TENSORS = ("q", "k", "v", "log_decay", "beta", "skip", "state", "pages", "starts", "o", "dout", "dfinal")
GRADIENTS = ("dq", "dk", "dv", "dlog_decay", "dbeta", "dskip", "dstate")
SIZES = ("stride", "heads", "query_heads", "key_heads", "value_heads", "K", "V", "decays")


class _Memory(ctypes.Structure):
    _fields_ = (
        *[(name, POINTER) for name in (*TENSORS, *GRADIENTS)],
        *[(name, INTEGER) for name in SIZES],
        ("scale", REAL),
    )


def _inputs(a) -> dict[str, Tensor | None]:
    """Of the `Inputs` or the `Token` of an op; dense and float32."""
    return {name: dense(getattr(a, name, None)) for name in TENSORS[:6]}


def _call(library: ctypes.CDLL, name: str, tensors: dict, scale: float, work: float):
    """The function `name` on all heads of all sequences; `work` operations per number of a state and token."""
    q, k, v, log_decay, state = (tensors[name] for name in ("q", "k", "v", "log_decay", "state"))
    heads, K, V = log_decay.shape[2], q.shape[-1], v.shape[-1]
    sizes = (state.stride(0), heads, q.shape[2], k.shape[2], v.shape[2], K, V, K if log_decay.dim() == 4 else 1)
    addresses = {name: address(t) for name, t in tensors.items()}
    memory = _Memory(**addresses, **dict(zip(SIZES, sizes, strict=True)), scale=scale)
    call = functools.partial(function(library, name, (POINTER, INTEGER, INTEGER)), ctypes.byref(memory))
    over_rows(call, (tensors["starts"].numel() - 1) * heads, work * q.shape[0] * q.shape[1] * heads * K * V)


def library_for(op: str, state: Tensor, *tensors: Tensor | None) -> ctypes.CDLL | None:
    """The native code of an op, if it should run on this state and these tensors; else None."""
    return native_library(op, *tensors) if state.dtype == torch.float32 else None


def forward(library: ctypes.CDLL, op: str, a) -> tuple[Tensor, Tensor]:
    """o [B, T, H, V] in q's dtype, and the final states [N, H, K, V], of the `Inputs` of an op."""
    state = a.initial_state.clone(memory_format=torch.contiguous_format)
    new = empty if a.cu_seqlens is None else zeros  # tokens of no sequence
    o = new(*a.q.shape[:2], a.log_decay.shape[2], a.v.shape[-1])
    tensors = _inputs(a) | {"state": state, "starts": starts_of(*a.q.shape[:2], a.cu_seqlens), "o": o}
    _call(library, f"{op}_tokens", tensors, a.scale, 7.0)
    return o.to(a.q.dtype), state


def backward(library: ctypes.CDLL, op: str, upstream, a) -> tuple[Tensor | None, ...]:
    """The gradients of q, k, v, log_decay, beta, skip and the first states; None for an input that is None."""
    tensors, new = _inputs(a), empty if a.cu_seqlens is None else zeros
    starts, state = starts_of(*a.q.shape[:2], a.cu_seqlens), dense(a.initial_state)
    heads, rows = a.log_decay.shape[:3], state.shape[:2]
    grads = {f"d{name}": new(*heads, t.shape[-1]) for name, t in zip("qkv", a[:3], strict=True)}
    grads |= {"dlog_decay": new(*a.log_decay.shape), "dbeta": None if tensors["beta"] is None else new(*heads)}
    grads |= {"dskip": None if tensors["skip"] is None else zeros(*rows), "dstate": torch.empty_like(state)}
    given = {"state": state, "starts": starts, "dout": dense(upstream.do), "dfinal": dense(upstream.dfinal)}
    _call(library, f"{op}_gradients", tensors | given | grads, a.scale, 30.0)
    for name, t in zip("qkv", a[:3], strict=True):  # the gradient of a shared head is the sum over its heads
        found = grads[f"d{name}"]
        shared = found if t.shape[2] == heads[2] else found.unflatten(2, (t.shape[2], -1)).sum(3)
        grads[f"d{name}"] = shared.to(t.dtype)
    grads["dskip"] = None if grads["dskip"] is None else grads["dskip"].sum(0)
    return tuple(grads.values())


def step(library: ctypes.CDLL, op: str, token) -> Tensor:
    """Read the one token [B, 1, heads, D] of the `Token` of an op, and update its states in place."""
    q, state = token.q, token.state
    o = empty(*token.log_decay.shape[:3], token.v.shape[-1])
    where = {"pages": pages_of(token.state_indices, len(state)), "starts": starts_of(q.shape[0], 1, None)}
    _call(library, f"{op}_tokens", _inputs(token) | where | {"state": state, "o": o}, token.scale, 7.0)
    changed(state)
    return o if q.dtype == torch.float32 else o.to(q.dtype)
