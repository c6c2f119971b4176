"""The gated delta rule, token by token in float64: the reference for the fast paths.

S_t = (I - beta_t k_t k_t^T) Diag(e^g_t) S_{t-1} + beta_t k_t v_t^T,  o_t = scale * S_t^T q_t

With one g per head: Yang et al., "Gated Delta Networks", https://arxiv.org/abs/2412.06464. With one g per key channel:
"Kimi Linear", https://arxiv.org/abs/2510.26692.
"""

import torch
from torch import Tensor


def naive_gated_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Shapes as `chunk_gated_delta`; everything is computed and returned in float64, differentiable by plain
    autograd.
    """
    if cu_seqlens is not None:
        bounds = cu_seqlens.tolist()
        parts = []
        for n, (start, stop) in enumerate(zip(bounds[:-1], bounds[1:], strict=True)):
            rows = (t[:, start:stop] for t in (q, k, v, log_decay, beta))
            state = None if initial_state is None else initial_state[n : n + 1]
            parts.append(naive_gated_delta(*rows, scale=scale, initial_state=state))
        return torch.cat([o for o, _ in parts], 1), torch.cat([state for _, state in parts])
    heads = beta.shape[2]
    q, k, v, g, beta = (t.double() for t in (q, k, v, log_decay, beta))
    q, k, v = (t.repeat_interleave(heads // t.shape[2], 2) for t in (q, k, v))
    g = g[..., None] if g.dim() == 3 else g
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    S = q.new_zeros(q.shape[0], heads, k.shape[-1], v.shape[-1]) if initial_state is None else initial_state.double()
    outputs = []
    for t in range(q.shape[1]):
        S = g[:, t, :, :, None].exp() * S
        found = (k[:, t, :, None, :] @ S)[..., 0, :]
        S = S + k[:, t, :, :, None] * (beta[:, t, :, None] * (v[:, t] - found))[..., None, :]
        outputs.append(scale * (q[:, t, :, None, :] @ S)[..., 0, :])
    return (torch.stack(outputs, 1) if outputs else v.new_zeros(v.shape)), S
