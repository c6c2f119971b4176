"""GKA, one token: advance the state in place and read it. One launch on a GPU.

H <- e^g H + beta^2 k k^T;  U <- e^g U + beta^2 v k^T;  o = scale * U (q + alpha (CH(H + ridge |H| I, q) - q))
"""

import torch

from .._dispatch import use_triton
from .naive import naive_solve
from .op import check
from .schedule import as_phases


@torch.library.custom_op("hf_memmix::gka_step", mutates_args=("h", "u"))
def _gka_step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    alpha: torch.Tensor,
    beta: torch.Tensor,
    h: torch.Tensor,
    u: torch.Tensor,
    phases: list[int],
    ridge: float,
    scale: float,
) -> torch.Tensor:
    if use_triton(q):
        from .recurrent_triton import gka_step_triton

        return gka_step_triton(q, k, v, log_decay, alpha, beta, h, u, phases, ridge, scale)
    groups = q.shape[2] // k.shape[2]
    queries = q[:, 0].to(h.dtype)
    keys, values = (t[:, 0].to(h.dtype).repeat_interleave(groups, 1) for t in (k, v))
    decay = log_decay[:, 0].to(h.dtype).exp()[..., None, None]
    written = (beta[:, 0].to(h.dtype).square()[..., None] * keys)[..., None, :]
    h.mul_(decay).add_(keys[..., :, None] * written)
    u.mul_(decay).add_(values[..., :, None] * written)
    x = naive_solve(h, queries, tuple(phases), ridge)
    mixed = queries + alpha[:, 0].to(h.dtype)[..., None] * (x - queries)
    return (scale * (u @ mixed[..., None])[..., 0]).to(q.dtype)[:, None]


@_gka_step.register_fake
def _(q, k, v, log_decay, alpha, beta, h, u, phases, ridge, scale):
    return q.new_empty(*q.shape[:3], v.shape[-1])


def gka_step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    alpha: torch.Tensor | None,
    beta: torch.Tensor | None,
    state: tuple[torch.Tensor, torch.Tensor],
    *,
    num_iterations: int = 30,
    refinement: tuple[int, ...] | None = None,
    ridge: float = 0.02,
    scale: float | None = None,
) -> torch.Tensor:
    """One decoding step of `chunk_gka`, without autograd.

    Args:
        q, k, v: [B, 1, H, D], [B, 1, Hk, D], [B, 1, Hk, Dv]; log_decay, alpha, beta: [B, 1, H]; as in `chunk_gka`.
        state: contiguous (H [B, H, D, D], U [B, H, Dv, D]), float32 or float64, updated IN PLACE.

    Returns:
        o [B, 1, H, Dv] in q's dtype.

    Raises:
        ValueError: more than one token, shapes that do not fit, or a state that is not contiguous.
    """
    check(q, k, v, log_decay, alpha, beta, state, None, ridge)
    if q.shape[1] != 1:
        raise ValueError(f"gka_step advances by one token, got {q.shape[1]}; use chunk_gka for several")
    h, u = state
    if not (h.is_contiguous() and u.is_contiguous()):
        raise ValueError("gka_step updates its state in place: pass contiguous (H, U), e.g. by .contiguous()")
    alpha = torch.ones_like(log_decay) if alpha is None else alpha
    beta = torch.ones_like(log_decay) if beta is None else beta
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    phases = as_phases(num_iterations, refinement)
    return _gka_step(q, k, v, log_decay, alpha, beta, h, u, list(phases), ridge, scale)
