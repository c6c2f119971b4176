"""The native path, for a CPU: one token, by native.cpp."""

import ctypes

from torch import Tensor

from .._native import INTEGER, POINTER, REAL, address, changed, dense, empty, function, pages_of
from .arguments import Token

STEP = (*[POINTER] * 7, INTEGER, POINTER, *[INTEGER] * 8, REAL)


def gated_delta_step_native(library: ctypes.CDLL, token: Token) -> Tensor:
    """Read one token [B, 1, heads, D] and update the state [B, H, K, V], or its pages, in place."""
    q, k, v, log_decay, beta, state, state_indices, scale = token
    dtype, pages = q.dtype, pages_of(state_indices, len(state))
    q, k, v, log_decay, beta = (dense(t) for t in (q, k, v, log_decay, beta))
    (batch, _, heads), K, V = beta.shape, q.shape[-1], v.shape[-1]
    o = empty(batch, 1, heads, V)
    function(library, "gated_delta_step", STEP)(
        q.data_ptr(), k.data_ptr(), v.data_ptr(), log_decay.data_ptr(), beta.data_ptr(), state.data_ptr(),
        address(pages), state.stride(0), o.data_ptr(), batch, heads, q.shape[2], k.shape[2], v.shape[2], K, V,
        K if log_decay.dim() == 4 else 1, scale,
    )  # fmt: skip
    changed(state)
    return o.to(dtype)
