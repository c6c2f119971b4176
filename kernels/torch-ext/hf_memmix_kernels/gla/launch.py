"""Launches of the gla kernels: grids, tile sizes, scratch memory. One layout for batched and packed input."""

from math import gcd

import torch
from torch import Tensor

from .._chunks import chunk_table
from .._common import FLOOR, num_sequences
from .._groups import flat
from .._launch import accumulator, by_rows, cdiv, next_power_of_2, page_strides
from .._tape import taped
from .arguments import Inputs, Token, Upstream
from .kernels.backward import gla_bwd_kernel_dqkg, gla_bwd_kernel_dv
from .kernels.forward import gla_cumsum_kernel, gla_fwd_kernel, gla_scan_kernel
from .kernels.step import gla_step_kernel

# heads with one query and one key that a backward program reads in turn; measured on an H200: README.md
HEADS_PER_PROGRAM = 8


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

    def __init__(self, a: Inputs):
        q, k, v, log_decay, beta, _, _, cu_seqlens, _, chunk_size = a
        (B, T, H), K, V = log_decay.shape, q.shape[3], v.shape[3]
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
        (self.q, s_q), (self.k, s_k), (self.v, s_v) = by_rows(q), by_rows(k), by_rows(v)
        self.strides = (s_q, s_k, s_v)
        # how many heads share a head of q, k and v
        self.shared = {"RQ": H // q.shape[2], "RK": H // k.shape[2], "RV": H // v.shape[2]}
        # the gates by head, because a program reads the tokens of one head
        by_head = log_decay.new_empty(1 if beta is None else 2, H, rows)
        self.G, self.beta = by_head[0], None if beta is None else by_head[1]
        gates = log_decay.contiguous(), None if beta is None else beta.contiguous()
        BH = min(16, next_power_of_2(H))
        gla_cumsum_kernel[(self.chunks, cdiv(H, BH))](
            gates, (self.G, self.beta), self.layout, T, NT, N, H, rows,
            FLOOR=FLOOR[log_decay.dtype], BH=BH, num_warps=2, **self.options,
        )  # fmt: skip

    def states(self, initial: Tensor) -> tuple[Tensor, Tensor]:
        """The states before every chunk [chunks, H, K, V] in the dtype of the inputs, and the last state."""
        inputs = (self.k, self.v, self.G, self.beta)
        return self._scan(inputs, self.strides[1:], (self.shared["RK"], self.shared["RV"]), initial, 1.0, False)

    def state_gradients(self, do: Tensor, final: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """The gradients of the states after every chunk and of the initial states; do is contiguous [B, T, H, V]."""
        inputs, strides = (self.q, do, self.G, None), (self.strides[0], self.H * self.V)
        return self._scan(inputs, strides, (self.shared["RQ"], 1), final, scale, True)

    def _scan(self, inputs, strides, shared, initial: Tensor, scale: float, reverse: bool) -> tuple[Tensor, Tensor]:
        states = self.q.new_empty(self.chunks, self.H, self.K, self.V)
        last = torch.empty_like(initial, memory_format=torch.contiguous_format)
        tiles = _tiles(self.q, self.chunk_size, self.K, self.V, 64, 64, 3)
        grid = (cdiv(self.K, tiles["BK"]) * cdiv(self.V, tiles["BV"]) * self.N * self.H,)
        T, NT, _, *sizes = self.sizes
        gla_scan_kernel[grid](
            inputs, initial.contiguous(), states, last, self.layout[:2], scale, (T, NT, *sizes), strides,
            RA=shared[0], RB=shared[1], REVERSE=reverse, **tiles, **self.options, **self.dots,
        )  # fmt: skip
        return states, last


@taped
@flat(Inputs)
def gla_fwd_triton(a: Inputs) -> tuple[Tensor, Tensor]:
    """Returns o [B, T, H, V] in q.dtype and the final states [N, H, K, V]."""
    launch = _Launch(a)
    states, final = launch.states(a.initial_state)
    o = a.q.new_empty(*a.log_decay.shape, launch.V)
    tiles = _tiles(a.q, a.chunk_size, launch.K, launch.V, 64, 128, 1)
    skip = None if a.skip is None else a.skip.contiguous()
    gla_fwd_kernel[(cdiv(launch.V, tiles["BV"]) * launch.chunks, launch.H)](
        (launch.q, launch.k, launch.v, launch.G, launch.beta, skip), states, o, launch.layout, a.scale, launch.sizes,
        launch.strides, **launch.shared, **tiles, **launch.options, **launch.dots,
    )  # fmt: skip
    return o, final


@taped
@flat(Upstream, Inputs)
def gla_bwd_triton(upstream: Upstream, a: Inputs) -> tuple[Tensor | None, ...]:
    """Returns dq, dk, dv, dlog_decay, dbeta, dskip and the gradient of the initial states."""
    q, k, v, log_decay, beta, skip, initial_state, cu_seqlens, scale, chunk_size = a
    do, launch = upstream.do.contiguous(), _Launch(a)
    states, _ = launch.states(initial_state)
    dstates, dinitial = launch.state_gradients(do, upstream.dfinal, scale)
    inputs = launch.q, launch.k, launch.v, launch.G, launch.beta
    shared = launch.shared
    # at least 64 columns: ptxas 12.8 takes descriptors of narrower tiles from the wrong registers ("Traps")
    tiles = _tiles(q, chunk_size, max(launch.K, 64), launch.V, 64, 64, 2)
    blocks = cdiv(launch.K, tiles["BK"])
    # where heads share q and k, several programs add up the gradients of their heads
    heads, parts = shared["RK"], 1
    if shared["RQ"] > 1:
        heads = gcd(heads, HEADS_PER_PROGRAM)
        parts = shared["RK"] // heads
    sums = {"device": q.device, "dtype": q.dtype if parts == 1 else log_decay.dtype}
    dq = torch.empty(parts if shared["RQ"] > 1 else 1, *q.shape, **sums)
    dk = torch.empty(parts, *k.shape, **sums)
    dg = log_decay.new_empty(blocks, *log_decay.shape)
    gla_bwd_kernel_dqkg[(blocks * launch.chunks, launch.H // heads)](
        do, inputs, (states, dstates), (dq, dk, dg), launch.layout, scale, launch.sizes, launch.strides,
        HEADS=heads, **shared, **tiles, **launch.options, **launch.dots,
    )  # fmt: skip
    tiles = _tiles(q, chunk_size, launch.K, launch.V, 64, 128, 2)
    blocks = cdiv(launch.V, tiles["BV"])
    dv = torch.empty_like(v, memory_format=torch.contiguous_format)
    dbeta = None if beta is None else log_decay.new_empty(blocks, *log_decay.shape)
    dskip = None
    if skip is not None:
        # unused chunks of a packed launch write nothing
        shape = launch.chunks * blocks, launch.H
        dskip = log_decay.new_empty(shape) if cu_seqlens is None else log_decay.new_zeros(shape)
        skip = skip.contiguous()
    gla_bwd_kernel_dv[(blocks * launch.chunks, v.shape[2])](
        do, (*inputs, skip), dstates, (dv, dbeta, dskip), launch.layout, scale, launch.sizes, launch.strides,
        **shared, **tiles, **launch.options, **launch.dots,
    )  # fmt: skip
    dq, dk, dg, dbeta = (_sum_of_parts(t) for t in (dq, dk, dg, dbeta))
    dskip = None if skip is None else dskip.sum(0)
    return dq.to(q.dtype), dk.to(k.dtype), dv, dg, dbeta, dskip, dinitial


def _sum_of_parts(x: Tensor | None) -> Tensor | None:
    return x if x is None else x[0] if len(x) == 1 else x.sum(0)


@taped
@flat(Token)
def gla_step_triton(token: Token) -> Tensor:
    """One launch that reads one token [B, 1, heads, D] and updates `state` [B, H, K, V], or its pages, in place."""
    q, k, v, log_decay, beta, skip, state, state_indices, scale = token
    (B, _, H), K, V = log_decay.shape, q.shape[3], v.shape[3]
    o = q.new_empty(B, 1, H, V)
    BK, BV = next_power_of_2(K), min(32, next_power_of_2(V))
    (q, s_q), (k, s_k), (v, s_v) = by_rows(q), by_rows(k), by_rows(v)
    gates = (None if t is None else t.contiguous() for t in (log_decay, beta, skip))
    gla_step_kernel[(B * H, cdiv(V, BV))](
        (q, k, v, *gates), state, state_indices, *page_strides(state_indices, state), o, scale, H, K, V,
        (s_q, s_k, s_v),
        RQ=H // q.shape[2], RK=H // k.shape[2], RV=H // v.shape[2], BK=BK, BV=BV, num_warps=4,
        ACC=accumulator(state.dtype),
    )  # fmt: skip
    return o
