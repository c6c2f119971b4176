"""Launches of the kernels of a window: tile sizes and grids."""

import math

import torch
from torch import Tensor

from .._chunks import chunk_table
from .._common import compute_dtype, num_sequences
from .._groups import flat
from .._launch import accumulator, aligned, by_rows, cdiv, next_power_of_2, page_strides
from .._tape import taped
from .arguments import Reach, Results, Sizes, States, Tokens, Upstream
from .kernels.backward import window_bwd_kernel_dkv, window_bwd_kernel_dq, window_bwd_kernel_sinks
from .kernels.forward import window_fwd_kernel
from .kernels.step import window_step_kernel

LOG2E = math.log2(math.e)


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


def _layout(x: Tokens, reach: Reach, block: int, of_keys: bool = False) -> tuple[tuple, int]:
    """Where sequences and their tiles of `block` queries, or keys, lie; the number of tiles, an upper bound for packed
    sequences."""
    (B, T), cu_seqlens, seen = x.q.shape[:2], reach.cu_seqlens, reach.seen
    past = _past(reach) if of_keys else 0
    seen = None if seen is None else seen.to(torch.int32, memory_format=torch.contiguous_format)
    if cu_seqlens is None:
        return (None, None, None, seen), B * cdiv(T + past, block)
    cu_seqlens = cu_seqlens.contiguous()
    bounds, keys = cu_seqlens, T
    if past:  # each sequence has its state before its keys
        bounds = cu_seqlens + past * torch.arange(len(cu_seqlens), dtype=cu_seqlens.dtype, device=cu_seqlens.device)
        keys = T + past * (len(cu_seqlens) - 1)
    first, sequence, tiles = chunk_table(bounds, keys, block)
    return (cu_seqlens, first, sequence, seen), tiles


def _past(reach: Reach) -> int:
    """Places before the keys of each sequence."""
    return 0 if reach.seen is None else reach.sinks + reach.window - 1


def _shared(x: Tokens, reach: Reach) -> tuple[tuple, dict]:
    """What all kernels of a call take: numbers, and constants."""
    (B, T, H, D), packed = x.q.shape, reach.cu_seqlens is not None
    numbers = (T, num_sequences(B, reach.cu_seqlens), B * T, _past(reach), reach.window, reach.scale, reach.softcap)
    return numbers, {
        "H": H, "G": H // x.k.shape[2], "D": D, "SINKS": reach.sinks, "PACKED": packed, **_dots(x.q)
    }  # fmt: skip


@taped
@flat(Tokens, Reach)
def window_fwd_triton(x: Tokens, reach: Reach) -> tuple[Tensor, Tensor]:
    """o [B, T, H, D] and, per head and query [H, B T], the logarithm to base 2 of the sum of e^scores."""
    B, T, H, D = x.q.shape
    x, sink_logits = Tokens(*map(aligned, x)), None if reach.sink_logits is None else reach.sink_logits.contiguous()
    o, lse = torch.empty_like(x.q), x.q.new_empty(H, B * T, dtype=compute_dtype(x.q.dtype))
    numbers, constants = _shared(x, reach)
    tiles = _tiles(x.q, D, 128, 64, 8 if D > 64 else 4, 3)
    layout, count = _layout(x, reach, tiles["BM"])
    window_fwd_kernel[(count, H)]((*x, sink_logits), (o, lse), layout, *numbers, **constants, **tiles)
    return o, lse


@taped
@flat(Upstream, Tokens, Results, Reach)
def window_bwd_triton(
    upstream: Upstream, x: Tokens, results: Results, reach: Reach
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv and dsink_logits, which is empty without sink logits."""
    H, D = x.q.shape[2:]
    x, do, (o, lse) = Tokens(*map(aligned, x)), aligned(upstream.do), results
    dq, dk, dv, delta = (torch.empty_like(t) for t in (*x, lse))
    numbers, constants = _shared(x, reach)
    tiles = _tiles(x.q, D, 64, 64, 4, 2)
    layout, count = _layout(x, reach, tiles["BM"])
    parts = lse.new_empty(count, H, reach.sinks, 2, D)
    window_bwd_kernel_dq[(count, H)](
        tuple(x), (do, o, lse), (dq, delta, parts), layout, *numbers, **constants, **tiles
    )
    of_keys, key_tiles = _layout(x, reach, tiles["BN"], of_keys=True)
    window_bwd_kernel_dkv[(key_tiles, x.k.shape[2])](
        tuple(x), (do, lse, delta), (dk, dv), of_keys, *numbers, **constants, **tiles
    )
    if reach.sinks:
        T, sequences, _, past, _, scale, _ = numbers
        constants.pop("PRECISION")
        window_bwd_kernel_sinks[(reach.sinks * sequences, x.k.shape[2])](
            parts, (dk, dv), layout, T, past, scale, **constants, BD=tiles["BD"], BM=tiles["BM"], BR=32, num_warps=4
        )
    if reach.sink_logits is None:
        return dq, dk, dv, lse.new_empty(0)
    weights = torch.exp2(reach.sink_logits.to(lse.dtype)[:, None] * LOG2E - lse)
    return dq, dk, dv, -(weights * delta).sum(1)


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
