"""Lattice token by token in float64: the reference for the fast paths.

s_i <- P_C(mu s_i - gamma c_i P(s_i) h / |s_i|),  y = S q,  P(s) = I - s s^T / |s|^2  (eq. 13, 14 and 16)

Karami and Mirrokni, "Lattice: Learning to Efficiently Compress the Memory", https://arxiv.org/abs/2504.05646.
Equation numbers are those of the paper.
"""

import torch
from torch import Tensor

VARIANTS = ("dec", "enc", "sim", "ttt", "delta")
BASELINES = ("ttt", "delta")


def naive_write(
    S: Tensor, k: Tensor, v: Tensor, gamma: Tensor, mu: Tensor, variant: str, project: bool, l1: float
) -> Tensor:
    """One update of S [..., d, m] by k [..., m, 1], v [..., d, 1] and the scalars gamma, mu [..., 1, 1]."""
    norm = torch.linalg.vector_norm(S, dim=-2, keepdim=True)
    unit = S if project else S / norm
    if variant == "dec":
        h, c = unit @ k - v, k  # eq. 7
    elif variant == "enc":
        h, c = v, unit.mT @ v - k  # eq. 10
    elif variant == "sim":
        h, c = -v, k  # eq. 12
    elif variant == "delta":
        h, c = S @ k - v, k  # eq. 20, the delta rule
    else:
        z = S @ k  # eq. 19, TTT: the output is normalised, not the slots
        size = torch.linalg.vector_norm(z, dim=-2, keepdim=True)
        inverse = torch.where(size > 0, 1 / torch.where(size > 0, size, 1), 0)  # z = 0 writes nothing
        e = z * inverse - v
        h, c = (e - z * (z.mT @ e) * inverse.square()) * inverse, k
    direction = h if variant in BASELINES else h - unit * (unit.mT @ h).mT
    S = mu * S - gamma * (direction if project or variant in BASELINES else direction / norm) * c.mT
    if l1:
        kept = S.sign() * (S.abs() - gamma * l1).clamp_min(0)  # eq. 18
        # a column that would become zero has no direction, so it is not changed
        S = torch.where((kept != 0).any(-2, keepdim=True), kept, S)
    return S / torch.linalg.vector_norm(S, dim=-2, keepdim=True) if project else S  # eq. 14


def naive_lattice(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gamma: Tensor,
    log_decay: Tensor | None = None,
    *,
    variant: str = "dec",
    project: bool = True,
    l1: float = 0.0,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The recurrence as in the paper, in float64; autograd can differentiate it in every tensor.

    Shapes and meaning of the arguments are as in `chunk_lattice`. All results are float64.
    """
    options = {"variant": variant, "project": project, "l1": l1}
    if cu_seqlens is not None:
        bounds = cu_seqlens.tolist()
        parts = []
        for n, (start, stop) in enumerate(zip(bounds[:-1], bounds[1:], strict=True)):
            rows = [t if t is None else t[:, start:stop] for t in (q, k, v, gamma, log_decay)]
            state = None if initial_state is None else initial_state[n : n + 1]
            parts.append(naive_lattice(*rows, **options, initial_state=state))
        return torch.cat([part[0] for part in parts], 1), torch.cat([part[1] for part in parts])

    q, k, v, gamma = (t.double() for t in (q, k, v, gamma))
    mu = torch.ones_like(gamma) if log_decay is None else log_decay.double().exp()
    B, T, H, m = q.shape
    d = v.shape[-1]
    if initial_state is None:
        S = torch.eye(d, m, dtype=torch.float64, device=q.device).expand(B, H, d, m)
    else:
        S = initial_state.double()
    if project:
        S = S / torch.linalg.vector_norm(S, dim=-2, keepdim=True)
    outputs = []
    for t in range(T):
        scalars = (x[:, t, :, None, None] for x in (gamma, mu))
        S = naive_write(S, k[:, t, ..., None], v[:, t, ..., None], *scalars, **options)
        outputs.append((S @ q[:, t, ..., None])[..., 0])
    return torch.stack(outputs, 1) if outputs else v.new_zeros(v.shape), S
