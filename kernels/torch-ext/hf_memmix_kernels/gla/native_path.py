"""The native path, for a CPU: one token, by native.cpp."""

import ctypes

from torch import Tensor

from .._native import INTEGER, POINTER, REAL, address, changed, dense, empty, function, pages_of
from .arguments import Token

STEP = (*[POINTER] * 8, INTEGER, POINTER, *[INTEGER] * 7, REAL)


def gla_step_native(library: ctypes.CDLL, token: Token) -> Tensor:
    """Read one token [B, 1, heads, D] and update the state [B, H, K, V], or its pages, in place."""
    q, k, v, log_decay, beta, skip, state, state_indices, scale = token
    dtype, pages = q.dtype, pages_of(state_indices, len(state))
    q, k, v, log_decay, beta, skip = (dense(t) for t in (q, k, v, log_decay, beta, skip))
    (batch, _, heads), K, V = log_decay.shape, q.shape[-1], v.shape[-1]
    o = empty(batch, 1, heads, V)
    function(library, "gla_step", STEP)(
        q.data_ptr(), k.data_ptr(), v.data_ptr(), log_decay.data_ptr(), address(beta), address(skip), state.data_ptr(),
        address(pages), state.stride(0), o.data_ptr(), batch, heads, q.shape[2], k.shape[2], v.shape[2], K, V, scale,
    )  # fmt: skip
    changed(state)
    return o.to(dtype)
