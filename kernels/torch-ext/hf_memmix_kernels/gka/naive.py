"""GKA, token by token in float64: the reference for the fast paths.

    H_t = e^g H + b^2 k k^T,  U_t = e^g U + b^2 v k^T,  x = CH_r(H_t + a|H_t| I, q),  o = s U_t (q + alpha (x - q))

Peng et al., "Gated KalmaNet: A Fading Memory Layer Through Test-Time Ridge Regression", equation CH and Algorithm 1
with omega_0 = 2.
"""

import torch

from .._common import num_sequences
from .schedule import as_phases, omegas


def naive_chebyshev(A: torch.Tensor, q: torch.Tensor, step: torch.Tensor, num_iterations: int, ridge: float):
    """`num_iterations` Chebyshev steps on A x = q from x = step * q.

    A [..., D, D]; q [..., D]; step [..., 1] = 2 / (L + mu), with the bounds mu = lambda and L = |H| + lambda.
    """
    x_prev, x = torch.zeros_like(q), step * q
    for omega in omegas(num_iterations, ridge):
        residual = (A @ x[..., None])[..., 0] - q
        x, x_prev = x - omega * step * residual + (omega - 1) * (x - x_prev), x
    return x


def naive_solve(H: torch.Tensor, q: torch.Tensor, phases: tuple[int, ...], ridge: float) -> torch.Tensor:
    """x [..., D] with (H + ridge |H|_F I) x = q, in refinement phases; 0 where H is all zero."""
    squared = H.square().sum((-1, -2))
    empty = squared == 0
    norm = torch.where(empty, 1.0, squared).sqrt()[..., None]
    eye = torch.eye(H.shape[-1], dtype=H.dtype, device=H.device)
    A = H + ridge * norm[..., None] * eye
    step = torch.where(empty[..., None], 0.0, 2 / (norm * (1 + 2 * ridge)))
    x = torch.zeros_like(q)
    for iterations in phases:
        residual = q - (A @ x[..., None])[..., 0]
        x = x + naive_chebyshev(A, residual, step, iterations, ridge)
    return x


def naive_gka(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    alpha: torch.Tensor | None = None,
    beta: torch.Tensor | None = None,
    *,
    sketch: torch.Tensor | None = None,
    num_iterations: int = 30,
    refinement: tuple[int, ...] | None = None,
    ridge: float = 0.02,
    scale: float | None = None,
    initial_state: tuple[torch.Tensor, torch.Tensor] | None = None,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """The recurrence as in the paper, in float64; autograd can differentiate it in every tensor.

    Shapes and meaning of the arguments are as in `chunk_gka`. All results are float64.
    """
    if cu_seqlens is not None:
        bounds = cu_seqlens.tolist()
        parts = []
        for n in range(num_sequences(1, cu_seqlens)):
            rows = [t if t is None else t[:, bounds[n] : bounds[n + 1]] for t in (q, k, v, log_decay, alpha, beta)]
            state = None if initial_state is None else tuple(s[n : n + 1] for s in initial_state)
            options = {"num_iterations": num_iterations, "refinement": refinement, "ridge": ridge, "scale": scale}
            parts.append(naive_gka(*rows, sketch=sketch, **options, initial_state=state))
        states = tuple(torch.cat([part[1][i] for part in parts]) for i in range(2))
        return torch.cat([part[0] for part in parts], dim=1), states

    heads = q.shape[2]
    groups = heads // k.shape[2]
    q, k, v, g = (t.double() for t in (q, k, v, log_decay))
    k, v = (t.repeat_interleave(groups, 2) for t in (k, v))  # head-wise: query head h reads kv head h // groups
    alpha = torch.ones_like(g) if alpha is None else alpha.double()
    beta = torch.ones_like(g) if beta is None else beta.double()
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if sketch is not None:  # q^T S and k^T S, so below H is S^T H S, U is U S, and x is the solution before S x
        sketch = sketch.double().repeat_interleave(groups, 0)
        q, k = (torch.einsum("bthd,hds->bths", t, sketch) for t in (q, k))
    if initial_state is None:
        H = q.new_zeros(q.shape[0], heads, q.shape[-1], q.shape[-1])
        U = q.new_zeros(q.shape[0], heads, v.shape[-1], q.shape[-1])
    else:
        H, U = (s.double() for s in initial_state)

    outputs = []
    phases = as_phases(num_iterations, refinement)
    for t in range(q.shape[1]):
        decay, write = g[:, t].exp()[..., None, None], beta[:, t].square()[..., None, None]
        H = decay * H + write * k[:, t, :, :, None] * k[:, t, :, None, :]
        U = decay * U + write * v[:, t, :, :, None] * k[:, t, :, None, :]
        x = naive_solve(H, q[:, t], phases, ridge)
        blended = q[:, t] + alpha[:, t, :, None] * (x - q[:, t])
        outputs.append(scale * (U @ blended[..., None])[..., 0])
    o = torch.stack(outputs, 1) if outputs else v.new_zeros(q.shape[0], 0, heads, v.shape[-1])
    return o, (H, U)
