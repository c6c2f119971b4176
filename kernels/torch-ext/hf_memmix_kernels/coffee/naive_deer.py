"""DEER for COFFEE in float64: Newton's method on the whole trajectory, the paper's way to run in parallel over time.

With r_k = f_k(x_{k-1}) - x_k and J_k = df_k/dx at the present trajectory, the update solves d_k = J_k d_{k-1} + r_k
with d_{-1} = 0. That is a linear recurrence, so a scan in parallel, and exact, because J is diagonal (Lim et al.,
"Parallelizing non-linear sequential models over the sequence length"; Gonzalez et al., "Towards scalable and stable
parallelization of nonlinear RNNs"). No fast path uses it: every token is linearised, so its first iterations overflow
where gates are steep, and on a GPU it was never the fastest method. README.md says what came of Newton's method on
chunks of time.
"""

import torch
from torch import Tensor


def naive_deer_coffee(
    u: Tensor, lam: Tensor, w: Tensor, C: Tensor, *, initial_state: Tensor | None = None, iterations: int = 32
) -> tuple[Tensor, Tensor, list[float]]:
    """`naive_coffee` with the gate sigmoid(w x), by Newton's iterations instead of tokens in sequence.

    Args:
        u, lam, w, C, initial_state: as in `chunk_coffee`.
        iterations: after T iterations the states are exact; far fewer are needed where states forget.

    Returns:
        y [B, T, D], the final state [B, D, n], and the largest update of each iteration, relative to 1 + |x|.
    """
    u, lam, w, C = (t.double() for t in (u, lam, w, C))
    start = u.new_zeros(u.shape[0], *lam.shape) if initial_state is None else initial_state.double()
    x, updates = start[:, None].expand(-1, u.shape[1], -1, -1), []  # [B, T, D, n]: the state after every token
    for _ in range(iterations):
        before = torch.cat([start[:, None], x[:, :-1]], 1)
        s, v = torch.sigmoid(w * before), lam * before + u[..., None]
        J, r = 1 + lam * s + w * s * (1 - s) * v, before + s * v - x
        d = [r[:, 0]]
        for k in range(1, u.shape[1]):
            d.append(J[:, k] * d[-1] + r[:, k])
        d = torch.stack(d, 1)
        x = x + d
        updates.append((d.abs() / (1 + x.abs())).max().item())
    return (C * x).sum(-1), x[:, -1], updates
