"""Gated linear attention with one decay per head, token by token in float64: the reference for the fast paths.

S_t = e^g S_{t-1} + beta_t k_t v_t^T,  o_t = scale * S_t^T q_t + skip v_t

This is Mamba-2 (Dao and Gu, "Transformers are SSMs", https://arxiv.org/abs/2405.21060) written as attention, and the
output stage of Gated KalmaNet.
"""

import torch
from torch import Tensor


def naive_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor | None = None,
    skip: Tensor | None = None,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Shapes as `chunk_gla`; everything is computed and returned in float64, differentiable by plain autograd."""
    if cu_seqlens is not None:
        bounds = cu_seqlens.tolist()
        parts = []
        for n, (start, stop) in enumerate(zip(bounds[:-1], bounds[1:], strict=True)):
            rows = (t if t is None else t[:, start:stop] for t in (q, k, v, log_decay, beta))
            state = None if initial_state is None else initial_state[n : n + 1]
            parts.append(naive_gla(*rows, skip, scale=scale, initial_state=state))
        return torch.cat([o for o, _ in parts], 1), torch.cat([state for _, state in parts])
    heads = log_decay.shape[2]
    q, k, v, g = (t.double() for t in (q, k, v, log_decay))
    q, k, v = (t.repeat_interleave(heads // t.shape[2], 2) for t in (q, k, v))
    written = v if beta is None else beta.double()[..., None] * v
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    S = q.new_zeros(q.shape[0], heads, k.shape[-1], v.shape[-1]) if initial_state is None else initial_state.double()
    outputs = []
    for t in range(q.shape[1]):
        S = g[:, t, :, None, None].exp() * S + k[:, t, :, :, None] * written[:, t, :, None, :]
        outputs.append(scale * (q[:, t, :, None, :] @ S)[..., 0, :])
    o = torch.stack(outputs, 1) if outputs else v.new_zeros(v.shape)
    return (o if skip is None else o + skip.double()[:, None] * v), S
