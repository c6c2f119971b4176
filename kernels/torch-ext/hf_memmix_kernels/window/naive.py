"""The definition of a window, query by query, in float64."""

import torch
from torch import Tensor


def naive_window(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window: int,
    sinks: int = 0,
    scale: float | None = None,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """o [B, T, H, D] in float64; arguments as in `chunk_window`, without states."""
    q, k, v = (x.double() for x in (q, k, v))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    group = q.shape[2] // k.shape[2]
    bounds = [0, q.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
    o = torch.zeros_like(q)
    for start, end in zip(bounds[:-1], bounds[1:], strict=True):
        for t in range(start, end):
            read = [s for s in range(start, t + 1) if s > t - window or s - start < sinks]
            for h in range(q.shape[2]):
                keys, values = (x[:, read, h // group] for x in (k, v))
                logits = torch.einsum("bd,bsd->bs", q[:, t, h], keys) * scale
                if softcap is not None:
                    logits = softcap * torch.tanh(logits / softcap)
                if sink_logits is not None:
                    logits = torch.cat([logits, sink_logits[h].double().expand(len(q), 1)], 1)
                weights = logits.softmax(1)[:, : len(read)]
                o[:, t, h] = torch.einsum("bs,bsd->bd", weights, values)
    return o
