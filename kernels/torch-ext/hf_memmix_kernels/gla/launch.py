"""Launches of the gla kernels: grids, tile sizes, scratch memory. One layout for batched and packed input."""

import torch
from torch import Tensor

from .._chunks import chunk_table
from .._common import num_sequences
from .._launch import accumulator, cdiv, next_power_of_2, page_strides
from .kernels.backward import gla_bwd_kernel_dqkg, gla_bwd_kernel_dv
from .kernels.forward import gla_cumsum_kernel, gla_fwd_kernel, gla_scan_kernel
from .kernels.step import gla_step_kernel


def _block(size: int, limit: int) -> int:
    return max(16, min(limit, next_power_of_2(size)))


def _tiles(x: Tensor, chunk_size: int, K: int, V: int, limit_k: int, limit_v: int, num_stages: int) -> dict:
    """Block sizes and launch options. 32-bit operands take twice the shared memory, so their tiles are small."""
    if x.element_size() > 2:
        limit_k, limit_v, num_stages = 32, 32, 1
    num_warps = 8 if chunk_size == 128 else 4
    return {"BK": _block(K, limit_k), "BV": _block(V, limit_v), "num_stages": num_stages, "num_warps": num_warps}


class _Launch:
    """Grids, tables and constants that the kernels of one call share.

    Chunks and sequences are on the first dimension of a grid, because the other dimensions are limited to 65535.
    """

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, cu_seqlens: Tensor | None, chunk_size: int):
        B, T, H, K = q.shape
        self.kv_heads, V = v.shape[2:]
        rows, N = B * T, num_sequences(B, cu_seqlens)
        self.chunk_size = chunk_size
        first = sequence = None
        NT = cdiv(T, chunk_size)
        self.chunks = B * NT
        if cu_seqlens is not None:
            first, sequence, self.chunks = chunk_table(cu_seqlens, T, chunk_size)
        self.layout = (cu_seqlens, first, sequence)
        self.N, self.H, self.K, self.V = N, H, K, V
        self.sizes = (T, NT, N, H, K, V, rows)
        self.options = {"BT": chunk_size, "PACKED": cu_seqlens is not None}
        self.dots = {
            "ACC": accumulator(q.dtype),
            "PRECISION": "ieee" if q.dtype in (torch.float32, torch.float64) else None,
        }
        self.G = log_decay.new_empty(H, rows)
        BH = min(16, next_power_of_2(H))
        gla_cumsum_kernel[(self.chunks, cdiv(H, BH))](
            log_decay.contiguous(), self.G, self.layout, T, NT, N, H, rows, BH=BH, num_warps=2, **self.options
        )

    def scan(self, a: Tensor, b: Tensor, initial: Tensor, scale: float, reverse: bool) -> tuple[Tensor, Tensor]:
        """States per chunk [chunks, H, K, V] in a's dtype and the last state, like `initial`."""
        states = a.new_empty(self.chunks, self.H, self.K, self.V)
        final = torch.empty_like(initial, memory_format=torch.contiguous_format)
        tiles = _tiles(a, self.chunk_size, self.K, self.V, 64, 64, 3)
        grid = (cdiv(self.K, tiles["BK"]) * cdiv(self.V, tiles["BV"]) * self.N * self.H,)
        T, NT, _, *sizes = self.sizes
        gla_scan_kernel[grid](
            (a, b, self.G), initial.contiguous(), states, final, self.layout[:2], scale, (T, NT, *sizes),
            GROUPS=self.H // a.shape[2], REVERSE=reverse, **tiles, **self.options, **self.dots,
        )  # fmt: skip
        return states, final


def gla_fwd_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    initial_state: Tensor,
    cu_seqlens: Tensor | None,
    scale: float,
    chunk_size: int,
) -> tuple[Tensor, Tensor]:
    """Returns o [B, T, H, V] in q.dtype and the final states [N, H, K, V]."""
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    launch = _Launch(q, k, v, log_decay, cu_seqlens, chunk_size)
    states, final = launch.scan(k, v, initial_state, scale, reverse=False)
    o = q.new_empty(*q.shape[:3], v.shape[-1])
    tiles = _tiles(q, chunk_size, launch.K, launch.V, 64, 128, 1)
    gla_fwd_kernel[(cdiv(launch.V, tiles["BV"]) * launch.chunks, launch.H)](
        (q, k, v, launch.G), states, o, launch.layout, scale, launch.sizes,
        GROUPS=launch.H // launch.kv_heads, **tiles, **launch.options, **launch.dots,
    )  # fmt: skip
    return o, final


def gla_bwd_triton(
    do: Tensor,
    dfinal: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    initial_state: Tensor,
    cu_seqlens: Tensor | None,
    scale: float,
    chunk_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns dq, dk, dv, dlog_decay and the gradient of the initial states."""
    do, q, k, v = (t.contiguous() for t in (do, q, k, v))
    launch = _Launch(q, k, v, log_decay, cu_seqlens, chunk_size)
    states, _ = launch.scan(k, v, initial_state, scale, reverse=False)
    dstates, dinitial = launch.scan(q, do, dfinal, scale, reverse=True)
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    groups = launch.H // launch.kv_heads
    # at least 64 columns: ptxas 12.8 takes descriptors of narrower tiles from the wrong registers ("Compiler traps")
    tiles = _tiles(q, chunk_size, max(launch.K, 64), launch.V, 64, 64, 2)
    blocks = cdiv(launch.K, tiles["BK"])
    dg = log_decay.new_empty(blocks, *log_decay.shape)
    gla_bwd_kernel_dqkg[(blocks * launch.chunks, launch.kv_heads)](
        do, (q, k, v, launch.G), (states, dstates), (dq, dk, dg), launch.layout, scale, launch.sizes,
        GROUPS=groups, **tiles, **launch.options, **launch.dots,
    )  # fmt: skip
    tiles = _tiles(q, chunk_size, launch.K, launch.V, 64, 128, 2)
    gla_bwd_kernel_dv[(cdiv(launch.V, tiles["BV"]) * launch.chunks, launch.kv_heads)](
        do, (q, k, launch.G), dstates, dv, launch.layout, scale, launch.sizes,
        GROUPS=groups, **tiles, **launch.options, **launch.dots,
    )  # fmt: skip
    return dq, dk, dv, dg.sum(0) if blocks > 1 else dg[0], dinitial


def gla_step_triton(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor, state_indices: Tensor | None, scale: float
) -> Tensor:
    """One launch that reads one token [B, 1, heads, D] and updates `state` [B, H, K, V], or its pages, in place."""
    B, _, H, K = q.shape
    V = v.shape[-1]
    o = q.new_empty(B, 1, H, V)
    BK, BV = next_power_of_2(K), min(32, next_power_of_2(V))
    gla_step_kernel[(B * H, cdiv(V, BV))](
        *(t.contiguous() for t in (q, k, v, log_decay)), state, state_indices, *page_strides(state_indices, state), o,
        scale, H, K, V,
        GROUPS=H // k.shape[2], BK=BK, BV=BV, num_warps=4,
        ACC=accumulator(state.dtype),
    )  # fmt: skip
    return o
