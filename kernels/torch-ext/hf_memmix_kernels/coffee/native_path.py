"""The native path, for a CPU: one token, by native.cpp."""

import ctypes

import torch
from torch import Tensor

from .._native import INTEGER, POINTER, address, changed, dense, function, pages_of

FEEDBACKS = ("sigmoid", "linear", "input", "token")  # phi, in the order of native.cpp
STEP = (*[POINTER] * 7, INTEGER, POINTER, *[INTEGER] * 4)


def coffee_step_native(
    library: ctypes.CDLL,
    u: Tensor,
    lam: Tensor,
    w: Tensor,
    C: Tensor,
    w_filter: Tensor | None,
    state: Tensor,
    state_indices: Tensor | None,
    feedback: str,
) -> Tensor:
    """One token [B, 1, D] without a gate; advances the state [B, D, n], or its pages, in place."""
    dtype, pages, (features, states) = u.dtype, pages_of(state_indices, len(state)), lam.shape
    u, lam, w, C, w_filter = (dense(t) for t in (u, lam, w, C, w_filter))
    y = torch.empty_like(u)
    function(library, "coffee_step", STEP)(
        u.data_ptr(), lam.data_ptr(), w.data_ptr(), C.data_ptr(), address(w_filter), state.data_ptr(), address(pages),
        state.stride(0), y.data_ptr(), u.shape[0], features, states, FEEDBACKS.index(feedback),
    )  # fmt: skip
    changed(state)
    return y.to(dtype)
