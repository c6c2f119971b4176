"""Launches of the kernels of a window: tile sizes and grids."""

import torch
from torch import Tensor

from .._common import compute_dtype
from .._groups import flat
from .._launch import accumulator, by_rows, cdiv, next_power_of_2, page_strides
from .._tape import taped
from .arguments import Reach, Results, Sizes, States, Tokens, Upstream
from .kernels.backward import window_bwd_kernel_dkv, window_bwd_kernel_dq
from .kernels.forward import window_fwd_kernel
from .kernels.step import window_step_kernel


def _dots(x: Tensor) -> dict:
    return {
        "ACC": accumulator(x.dtype),
        "PRECISION": "ieee" if x.dtype in (torch.float32, torch.float64) else None,
    }


def _tiles(x: Tensor, D: int, queries: int, keys: int, num_warps: int, num_stages: int) -> dict:
    """Block sizes and launch options. 32-bit operands take twice the shared memory, so their tiles are small."""
    if x.element_size() > 2:
        queries, keys, num_stages = 32, 32, 1
    elif D > 128:
        queries, keys, num_stages = queries // 2, keys // 2, 1
    BD = max(16, next_power_of_2(D))
    return {"BD": BD, "BM": queries, "BN": keys, "num_warps": num_warps, "num_stages": num_stages}


def _shared(q: Tensor, k: Tensor, firsts: Tensor | None) -> tuple:
    """What all kernels of a call take: sizes, strides of `firsts`, heads."""
    (_, T, H, D), (_, keys, HK, _) = q.shape, k.shape
    # `firsts` has one row for all rows, or one number for all queries of a row
    strides = (0, 0)
    if firsts is not None:
        strides = tuple(s if n > 1 else 0 for n, s in zip(firsts.shape, firsts.stride(), strict=True))
    return (T, keys, keys - T), strides, {"H": H, "G": H // HK, "D": D, **_dots(q)}


@taped
@flat(Tokens, Reach)
def window_fwd_triton(x: Tokens, reach: Reach) -> tuple[Tensor, Tensor]:
    """o [B, T, H, D] and, per head and query [B, H, T], the logarithm to base 2 of the sum of e^scores."""
    (B, T, H, D), (firsts, window, scale, softcap) = x.q.shape, reach
    q, k, v = (t.contiguous() for t in x)
    o, lse = torch.empty_like(q), q.new_empty(B, H, T, dtype=compute_dtype(q.dtype))
    sizes, strides, options = _shared(q, k, firsts)
    tiles = _tiles(q, D, 128, 64, 8 if D > 64 else 4, 3)
    window_fwd_kernel[(cdiv(T, tiles["BM"]), H, B)](
        (q, k, v), (o, lse), firsts, sizes, strides, window, scale, softcap, **options, **tiles
    )
    return o, lse


@taped
@flat(Upstream, Tokens, Results, Reach)
def window_bwd_triton(upstream: Upstream, x: Tokens, results: Results, reach: Reach) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv."""
    (B, T, H, D), keys, (firsts, window, scale, softcap) = x.q.shape, x.k.shape[1], reach
    (q, k, v, do), (o, lse) = (t.contiguous() for t in (*x, *upstream)), results
    delta = (do.to(lse.dtype) * o.to(lse.dtype)).sum(-1).transpose(1, 2).contiguous()
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    sizes, strides, options = _shared(q, k, firsts)
    given = (do, lse, delta)
    tiles = _tiles(q, D, 64, 64, 4, 2)
    window_bwd_kernel_dq[(cdiv(T, tiles["BM"]), H, B)](
        (q, k, v), given, dq, firsts, sizes, strides, window, scale, softcap, **options, **tiles
    )
    window_bwd_kernel_dkv[(cdiv(keys, tiles["BN"]), k.shape[2], B)](
        (q, k, v), given, (dk, dv), firsts, sizes, strides, window, scale, softcap, **options, **tiles
    )
    return dq, dk, dv


@taped
@flat(Tokens, States, Sizes)
def window_step_triton(x: Tokens, states: States, sizes: Sizes) -> Tensor:
    """One launch that reads one token [B, 1, heads, D] and updates the states, or their pages, in place."""
    (q, k, v), (window, sinks, scale, softcap) = x, sizes
    sink_logits, keys, values, seen, state_indices = states
    B, _, H, D = q.shape
    HK = k.shape[2]
    o = q.new_empty(B, 1, H, D)
    (q, s_q), (k, s_k), (v, s_v) = by_rows(q), by_rows(k), by_rows(v)
    strides = (s_q, s_k, s_v, *page_strides(state_indices, keys, values, seen))
    sink_logits = None if sink_logits is None else sink_logits.contiguous()
    window_step_kernel[(B * HK,)](
        (q, k, v, sink_logits), (keys, values, seen), state_indices, strides, o, (window, sinks), scale, softcap,
        G=H // HK, HK=HK, D=D, BG=max(16, next_power_of_2(H // HK)), BD=max(16, next_power_of_2(D)),
        BN=64 if q.element_size() < 4 else 32 if D <= 128 else 16, num_warps=4, **_dots(q),
    )  # fmt: skip
    return o
