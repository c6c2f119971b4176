"""COFFEE (context from feedback), token by token in float64: the reference for the fast paths.

s_k = gate_k * sigmoid(w x_{k-1}),  x_k = (1 + lam s_k) x_{k-1} + s_k u_k,  y_k = sum_j C_j x_{k,j}

Equations 5 and 7 of "Feedback is All You Need" (the COFFEE paper), its output filter (Remark 2) and the other gates of
its ablation (Table 6).
"""

import torch
from torch import Tensor


def naive_coffee(
    u: Tensor,
    lam: Tensor,
    w: Tensor | None,
    C: Tensor,
    w_filter: Tensor | None = None,
    *,
    gate: Tensor | None = None,
    feedback: str = "sigmoid",
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Shapes as `chunk_coffee`; everything is computed and returned in float64, differentiable by plain autograd."""
    if cu_seqlens is not None:
        bounds = cu_seqlens.tolist()
        parts = []
        for n, (start, stop) in enumerate(zip(bounds[:-1], bounds[1:], strict=True)):
            own = None if gate is None else gate[:, start:stop]
            state = None if initial_state is None else initial_state[n : n + 1]
            row = u[:, start:stop]
            parts.append(naive_coffee(row, lam, w, C, w_filter, gate=own, feedback=feedback, initial_state=state))
        return torch.cat([y for y, _ in parts], 1), torch.cat([state for _, state in parts])
    u, lam, C = u.double(), lam.double(), C.double()
    w, w_filter, gate = (None if t is None else t.double() for t in (w, w_filter, gate))
    x = u.new_zeros(u.shape[0], *lam.shape) if initial_state is None else initial_state.double()
    outputs = []
    for k in range(u.shape[1]):
        u_k = u[:, k, :, None]
        if feedback == "sigmoid":  # equation 5: the state is the context
            s = torch.sigmoid(w * x)
        elif feedback == "linear":  # the same without its nonlinearity
            s = w * x
        elif feedback == "input":  # no feedback: the token instead of the state
            s = torch.sigmoid(w * u_k)
        else:  # "token", equation 4: whatever gate the model computed from the token
            s = torch.ones_like(x)
        if gate is not None:
            s = s * gate[:, k].view(u.shape[0], -1, 1)
        x = (1 + lam * s) * x + s * u_k
        y = (C * x).sum(-1)
        if w_filter is not None:
            y = torch.sigmoid((w_filter * x).sum(-1)) * y
        outputs.append(y)
    return torch.stack(outputs, 1) if outputs else u, x
