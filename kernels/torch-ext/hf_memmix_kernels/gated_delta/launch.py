"""Launches of the kernels of the gated delta rule: grids, tile sizes, scratch memory."""

import torch
from torch import Tensor

from .._chunks import chunk_table
from .._common import num_sequences
from .._device import dot_precision
from .._groups import flat
from .._launch import accumulator, by_rows, cdiv, next_power_of_2, page_strides
from .._tape import taped
from .arguments import FLOOR, Inputs, Token, Upstream
from .kernels.backward import (
    gated_delta_bwd_errors_kernel,
    gated_delta_bwd_keys_kernel,
    gated_delta_bwd_keys_of_channels_kernel,
)
from .kernels.pairs import (
    gated_delta_cumsum_kernel,
    gated_delta_pairs_kernel,
    gated_delta_pairs_of_channels_kernel,
)
from .kernels.scan import gated_delta_output_kernel, gated_delta_scan_back_kernel, gated_delta_scan_kernel
from .kernels.solve import gated_delta_solve_kernel
from .kernels.step import gated_delta_step_kernel

BLOCK = 16  # tokens whose pairs have a decay per channel of their own; the first blocks of the inverse


def _block(size: int, limit: int) -> int:
    return max(16, min(limit, next_power_of_2(size)))


class _Launch:
    """Grids, tables and constants that the kernels of one call share, and what forward and backward both compute.

    Chunks and sequences are on the first dimension of a grid, because the other dimensions are limited to 65535.
    """

    def __init__(self, a: Inputs):
        q, k, v, log_decay, beta, _, cu_seqlens, _ = a
        (B, T, H), K, V = beta.shape, q.shape[3], v.shape[3]
        N, wide = num_sequences(B, cu_seqlens), q.element_size() > 2
        self.channels = log_decay.dim() == 4
        # the scans hold keys of a whole chunk with all their channels
        self.BT = BT = 32 if wide or K > 128 else 64
        NT = cdiv(T, BT)
        first = sequence = None
        self.chunks = B * NT
        if cu_seqlens is not None:
            first, sequence, self.chunks = chunk_table(cu_seqlens, T, BT)
        self.layout = (cu_seqlens, first, sequence)
        self.N, self.H, self.K, self.V = N, H, K, V
        self.sizes = (T, NT, N, H, K, V)
        self.rows, self.dtype = (B, T, H), q.dtype
        (self.q, s_q), (self.k, s_k), (self.v, s_v) = by_rows(q), by_rows(k), by_rows(v)
        self.s_q, self.s_k, self.s_v = s_q, s_k, s_v
        self.RQ, self.RK, self.RV = H // q.shape[2], H // k.shape[2], H // v.shape[2]
        self.beta = beta.contiguous()
        packed = cu_seqlens is not None
        self.precise = {"ACC": accumulator(q.dtype), "PRECISION": "ieee" if wide else None}
        self.shared = {"BT": BT, "PACKED": packed, **self.precise}
        limit = 32 if wide else 64
        self.BK, self.BV = _block(K, limit), _block(V, limit)
        self.exact = "ieee" if wide else dot_precision("tf32x3")
        self._prepare(log_decay.contiguous())

    def new(self, *size: int, dtype: torch.dtype | None = None) -> Tensor:
        """Scratch memory [B, T, H, ...], in the dtype of the inputs."""
        return self.q.new_empty(*self.rows, *size, dtype=dtype or self.dtype)

    def _prepare(self, log_decay: Tensor):
        """G, A and B of all chunks."""
        self.G = torch.empty_like(log_decay)
        width = log_decay[0, 0].numel()
        BW = min(64, next_power_of_2(width))
        T, NT, N = self.sizes[:3]
        gated_delta_cumsum_kernel[(self.chunks, cdiv(width, BW))](
            log_decay, self.G, self.layout, T, NT, N, width,
            FLOOR=FLOOR[log_decay.dtype], BT=self.BT, BW=BW, PACKED=self.shared["PACKED"], num_warps=4,
        )  # fmt: skip
        self.A, self.B = self.new(self.BT, dtype=log_decay.dtype), self.new(self.BT)
        inputs, outputs, strides = (self.q, self.k, self.G), (self.A, self.B), (self.s_q, self.s_k)
        options = {"RQ": self.RQ, "RK": self.RK, "BK": self.BK, "num_warps": 4, "num_stages": 2, **self.shared}
        if self.channels:
            gated_delta_pairs_of_channels_kernel[(self.chunks * (self.BT // BLOCK), self.H)](
                inputs, outputs, self.layout, self.sizes, strides, BC=BLOCK, **options
            )
        else:
            gated_delta_pairs_kernel[(self.chunks, self.H)](
                inputs, outputs, self.layout, self.sizes, strides, **options
            )

    def solve(self, keep: bool) -> tuple[Tensor | None, Tensor, Tensor]:
        """T, if it is to be kept, W and Y."""
        solution = self.new(self.BT) if keep else None
        W, Y = self.new(self.K), self.new(self.V)
        gated_delta_solve_kernel[(self.chunks, self.H)](
            (self.k, self.v, self.G, self.beta, self.A), (solution, W, Y), self.layout, self.sizes,
            (self.s_k, self.s_v), RK=self.RK, RV=self.RV, BC=BLOCK, BK=self.BK, BV=self.BV, SOLVE=self.exact,
            CHANNELS=self.channels, num_warps=8, num_stages=1, **self.shared,
        )  # fmt: skip
        return solution, W, Y

    def _scan_grid(self) -> tuple[tuple[int], dict]:
        # at least 64 columns of 16 bits, also of smaller values: ptxas 12.8 takes descriptors of narrower tiles from
        # the wrong registers ("Traps")
        BK, BV = _block(self.K, 256), self.BV if self.q.element_size() > 2 else 64
        num_warps = 8 if BK > 64 else 4
        options = {"BK": BK, "BV": BV, "CHANNELS": self.channels, "num_warps": num_warps, "num_stages": 1}
        return (cdiv(self.V, BV) * self.N * self.H,), options | self.shared

    def new_states(self) -> Tensor:
        return self.q.new_empty(self.chunks, self.H, self.K, self.V)

    def scan(self, W: Tensor, Y: Tensor, initial: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The states before every chunk [chunks, H, K, V], the errors and the last state."""
        states, X = self.new_states(), self.new(self.V)
        final = torch.empty_like(initial, memory_format=torch.contiguous_format)
        grid, options = self._scan_grid()
        gated_delta_scan_kernel[grid](
            (self.k, self.G, self.beta, W, Y), initial.contiguous(), (states, X, final), self.layout[:2], self.sizes,
            self.s_k, RK=self.RK, **options,
        )  # fmt: skip
        return states, X, final

    def scan_back(self, do: Tensor, dfinal: Tensor, W: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of the states after every chunk, of beta X, and of the initial state."""
        dstates, dwrites = self.new_states(), self.new(self.V)
        dinitial = torch.empty_like(dfinal, memory_format=torch.contiguous_format)
        grid, options = self._scan_grid()
        gated_delta_scan_back_kernel[grid](
            (do, dfinal.contiguous()), (self.q, self.k, self.G, self.beta, W, self.B), (dstates, dwrites, dinitial),
            self.layout[:2], scale, self.sizes, (self.s_q, self.s_k), RQ=self.RQ, RK=self.RK, **options,
        )  # fmt: skip
        return dstates, dwrites, dinitial


@taped
@flat(Inputs)
def gated_delta_fwd_triton(a: Inputs) -> tuple[Tensor, Tensor]:
    """Returns o [B, T, H, V] in q.dtype and the final states [N, H, K, V]."""
    launch = _Launch(a)
    _, W, Y = launch.solve(keep=False)
    states, X, final = launch.scan(W, Y, a.initial_state)
    o = launch.new(launch.V)
    gated_delta_output_kernel[(cdiv(launch.V, launch.BV) * launch.chunks, launch.H)](
        (launch.q, launch.G, launch.beta), (states, X, launch.B), o, launch.layout, a.scale, launch.sizes, launch.s_q,
        RQ=launch.RQ, BK=launch.BK, BV=launch.BV, CHANNELS=launch.channels, num_warps=4, num_stages=1,
        **launch.shared,
    )  # fmt: skip
    return o, final


@taped
@flat(Upstream, Inputs)
def gated_delta_bwd_triton(upstream: Upstream, a: Inputs) -> tuple[Tensor, ...]:
    """Returns dq, dk, dv, dlog_decay, dbeta and the gradient of the initial states."""
    q, k, v, log_decay, beta, initial_state, _, scale = a
    do, launch = upstream.do.contiguous(), _Launch(a)
    solution, W, Y = launch.solve(keep=True)
    states, X, _ = launch.scan(W, Y, initial_state)
    dstates, dwrites, dinitial = launch.scan_back(do, upstream.dfinal, W, scale)
    dX, dA, dB = Y, launch.new(launch.BT), launch.new(launch.BT)  # Y is not read any more
    dbeta = torch.empty_like(beta, memory_format=torch.contiguous_format)
    gated_delta_bwd_errors_kernel[(launch.chunks, launch.H)](
        do, (launch.beta, launch.A, solution, X, dwrites), (dX, dA, dB, dbeta), launch.layout, scale, launch.sizes,
        BV=launch.BV, num_warps=4, num_stages=1, **launch.shared,
    )  # fmt: skip
    # of every head; where heads share, in fp32 until they are summed
    dq = launch.new(launch.K, dtype=q.dtype if launch.RQ == 1 else log_decay.dtype)
    dk = launch.new(launch.K, dtype=q.dtype if launch.RK == 1 else log_decay.dtype)
    BK = launch.BK if q.element_size() > 2 else 64
    blocks = cdiv(launch.K, BK)
    args = {"layout": launch.layout, "scale": scale, "strides": (launch.s_q, launch.s_k)}
    args |= {"RQ": launch.RQ, "RK": launch.RK, "BK": BK, "BV": launch.BV, "num_warps": 8, "num_stages": 1}
    args |= launch.shared
    inputs, chunks = (launch.q, launch.k, launch.G, launch.beta), (X, dX, states, dstates)
    grid = (blocks * launch.chunks, launch.H)
    if launch.channels:
        dg = torch.empty_like(log_decay, memory_format=torch.contiguous_format)
        args |= {"sizes": launch.sizes, "BC": BLOCK, "SUMS": launch.exact}
        gated_delta_bwd_keys_of_channels_kernel[grid](do, inputs, (dA, dB), chunks, (dq, dk, dg), **args)
    else:
        dg = log_decay.new_empty(blocks, *log_decay.shape)
        args |= {"sizes": (*launch.sizes, beta.shape[0] * beta.shape[1])}
        pairs = launch.A, launch.B, dA, dB
        gated_delta_bwd_keys_kernel[grid](do, inputs, pairs, chunks, (dq, dk, dg), **args)
        dg = dg[0] if blocks == 1 else dg.sum(0)
    dq, dk, dv = (_of_shared(t, x.shape[2]).to(x.dtype) for t, x in ((dq, q), (dk, k), (dX, v)))
    return dq, dk, dv, dg, dbeta, dinitial


def _of_shared(x: Tensor, heads: int) -> Tensor:
    """[B, T, H, D] -> [B, T, heads, D]: the sums over the heads that share one."""
    if x.shape[2] == heads:
        return x
    return x.unflatten(2, (heads, -1)).sum(3, dtype=torch.promote_types(x.dtype, torch.float32))


@taped
@flat(Token)
def gated_delta_step_triton(token: Token) -> Tensor:
    """One launch that reads one token [B, 1, heads, D] and updates `state` [B, H, K, V], or its pages, in place."""
    q, k, v, log_decay, beta, state, state_indices, scale = token
    (B, _, H), K, V = beta.shape, q.shape[3], v.shape[3]
    o = q.new_empty(B, 1, H, V)
    BK, BV = next_power_of_2(K), min(32, next_power_of_2(V))
    (q, s_q), (k, s_k), (v, s_v) = by_rows(q), by_rows(k), by_rows(v)
    gated_delta_step_kernel[(B * H, cdiv(V, BV))](
        (q, k, v, log_decay.contiguous(), beta.contiguous()), state, state_indices,
        *page_strides(state_indices, state), o, scale, H, K, V, (s_q, s_k, s_v),
        RQ=H // q.shape[2], RK=H // k.shape[2], RV=H // v.shape[2], BK=BK, BV=BV, num_warps=4,
        ACC=accumulator(state.dtype), CHANNELS=log_decay.dim() == 4,
    )  # fmt: skip
    return o
