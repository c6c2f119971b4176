"""Launch of the decode step of a window."""

import torch
from torch import Tensor

from .._launch import accumulator, by_rows, next_power_of_2, page_strides
from .._tape import taped
from .kernels.step import window_step_kernel


@taped
def window_step_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink_logits: Tensor | None,
    keys: Tensor,
    values: Tensor,
    seen: Tensor,
    state_indices: Tensor | None,
    window: int,
    sinks: int,
    scale: float,
    softcap: float | None,
) -> Tensor:
    """One launch that reads one token [B, 1, heads, D] and updates the states, or their pages, in place."""
    B, _, H, D = q.shape
    HK = k.shape[2]
    o = q.new_empty(B, 1, H, D)
    (q, s_q), (k, s_k), (v, s_v) = by_rows(q), by_rows(k), by_rows(v)
    strides = (s_q, s_k, s_v, *page_strides(state_indices, keys, values, seen))
    sink_logits = None if sink_logits is None else sink_logits.contiguous()
    window_step_kernel[(B * HK,)](
        (q, k, v, sink_logits), (keys, values, seen), state_indices, strides, o, (window, sinks), scale, softcap,
        G=H // HK, HK=HK, D=D, BG=max(16, next_power_of_2(H // HK)), BD=max(16, next_power_of_2(D)), BN=64,
        ACC=accumulator(q.dtype),
        PRECISION="ieee" if q.dtype in (torch.float32, torch.float64) else None,
        num_warps=4,
    )  # fmt: skip
    return o
