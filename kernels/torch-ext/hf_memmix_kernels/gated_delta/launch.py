"""Launches of the kernels of the gated delta rule: grids, tile sizes, scratch memory."""

import torch
from torch import Tensor

from .._chunks import chunk_table
from .._common import FLOOR, num_sequences
from .._device import device_of, dot_precision
from .._groups import flat
from .._launch import accumulator, aligned, aligned_rows, by_rows, cdiv, next_power_of_2, page_strides
from .._tape import taped
from .arguments import Inputs, Token, Upstream
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
from .kernels.solve import gated_delta_apply_kernel, gated_delta_invert_kernel
from .kernels.step import gated_delta_step_kernel

BLOCK = 16  # tokens whose pairs have a decay per channel of their own; the first blocks of the inverse
# log of the largest factor with which pairs with a decay per channel meet: far from the overflow of float32, and of
# float16, whose tiles hold these factors in the backward pass
LIMIT, LIMIT_OF_FLOAT16 = 60.0, 4.0


def _block(size: int, limit: int) -> int:
    return max(16, min(limit, next_power_of_2(size)))


class _Launch:
    """Grids, tables and constants that the kernels of one call share, and what forward and backward both compute.

    Chunks and sequences are on the first dimension of a grid, because the other dimensions are limited to 65535.
    """

    def __init__(self, a: Inputs):
        q, k, v, log_decay, beta, _, cu_seqlens, _ = a
        (B, T, H), K, V = beta.shape, q.shape[3], v.shape[3]
        N = num_sequences(B, cu_seqlens)
        self.wide = wide = q.element_size() > 2
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
        # no kernel is specialised for T, an argument of its own: of the scans of one token, which then have no loop,
        # ptxas 12.8 takes descriptors from the wrong registers, and of those that read addresses that are not aligned
        self.T, self.sizes = T, (NT, N, H, K, V)
        self.rows, self.dtype = (B, T, H), q.dtype
        (self.q, s_q), (self.k, s_k), (self.v, s_v) = aligned_rows(q), aligned_rows(k), aligned_rows(v)
        self.s_q, self.s_k, self.s_v = s_q, s_k, s_v
        self.RQ, self.RK, self.RV = H // q.shape[2], H // k.shape[2], H // v.shape[2]
        self.beta = aligned(beta)
        packed = cu_seqlens is not None
        self.layout_of = {"BT": BT, "PACKED": packed, "ACC": accumulator(q.dtype)}
        self.shared = {**self.layout_of, "PRECISION": "ieee" if wide else None}
        limit = 32 if wide else 64
        self.BK, self.BV = _block(K, limit), _block(V, limit)
        self.exact, self.apply = ("ieee", "ieee") if wide else (dot_precision("tf32x3"), dot_precision("tf32"))
        self.memory = device_of(q).shared
        self._prepare(aligned(log_decay))

    def new(self, *size: int, dtype: torch.dtype | None = None) -> Tensor:
        """Scratch memory [B, T, H, ...], in the dtype of the inputs."""
        return self.q.new_empty(*self.rows, *size, dtype=dtype or self.dtype)

    def _prepare(self, log_decay: Tensor):
        """G, A and B of all chunks."""
        self.G = torch.empty_like(log_decay)
        width = log_decay[0, 0].numel()
        BW = min(64, next_power_of_2(width))
        NT, N = self.sizes[:2]
        gated_delta_cumsum_kernel[(self.chunks, cdiv(width, BW))](
            log_decay, self.G, self.layout, self.T, NT, N, width,
            FLOOR=FLOOR[log_decay.dtype], BT=self.BT, BW=BW, PACKED=self.shared["PACKED"], num_warps=4,
        )  # fmt: skip
        self.A, self.B = self.new(self.BT, dtype=log_decay.dtype), self.new(self.BT)
        inputs, outputs, strides = (self.q, self.k, self.G), (self.A, self.B), (self.s_q, self.s_k)
        options = {"RQ": self.RQ, "RK": self.RK, "BK": self.BK, "num_warps": 4, "num_stages": 2}
        if self.channels:
            gated_delta_pairs_of_channels_kernel[(self.chunks * (self.BT // BLOCK), self.H)](
                inputs, outputs, self.layout, self.T, self.sizes, strides, BC=BLOCK, APPLY=self.apply, LIMIT=LIMIT,
                **options, **self.layout_of,
            )  # fmt: skip
        else:
            gated_delta_pairs_kernel[(self.chunks, self.H)](
                inputs, outputs, self.layout, self.T, self.sizes, strides, **options, **self.shared
            )

    def solve(self, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        """T, W and Y; after it, `read` and `write` are what the scans read of queries and keys."""
        solution = self.new(self.BT, dtype=self.G.dtype)
        W, Y = self.new(self.K), self.new(self.V)
        read, write = (self.new(self.K), self.new(self.K)) if self.channels else (None, None)
        gated_delta_invert_kernel[(self.chunks, self.H)](
            (self.beta, self.A), solution, self.layout, self.T, self.sizes[:3], BC=BLOCK, SOLVE=self.exact,
            num_warps=1, num_stages=1, **self.layout_of,
        )  # fmt: skip
        gated_delta_apply_kernel[(self.chunks, self.H)](
            (self.q, self.k, self.v, self.G, solution), (W, Y, read, write), self.layout, scale, self.T, self.sizes,
            (self.s_q, self.s_k, self.s_v), RQ=self.RQ, RK=self.RK, RV=self.RV, BK=self.BK, BV=self.BV,
            APPLY=self.apply, CHANNELS=self.channels, num_warps=4, num_stages=1, **self.layout_of,
        )  # fmt: skip
        if self.channels:  # of every head
            self.read, self.write = (read, self.H * self.K, 1), (write, self.H * self.K, 1)
        else:
            self.read, self.write = (self.q, self.s_q, self.RQ), (self.k, self.s_k, self.RK)
        return solution, W, Y

    def _scan_grid(self, width: int, stages: int) -> tuple[tuple[int], dict]:
        """At most `stages`; `width`: the values that a step loads ahead, per token, besides its block of columns."""
        BK, BT, bytes_of = _block(self.K, 256), self.BT, self.q.element_size()
        # rows of such sizes are not aligned, and ptxas 12.8 miscompiles what loads 32 columns of them
        odd = self.q.element_size() == 2 and (self.K % 16 or self.V % 16)
        BV = 64 if odd else _block(self.V, 32)
        # what a step loads, once per stage; the state and the errors are operands, too
        step, own = self.BT * (width + BV) * bytes_of, (2 * BK + BT) * BV * bytes_of
        fitting = 1 if self.wide or odd else max(1, (self.memory - own) // step)
        options = {"BK": BK, "BV": BV, "CHANNELS": self.channels, "num_warps": 4, "num_stages": min(stages, fitting)}
        return (cdiv(self.V, BV) * self.N * self.H,), options | self.shared

    def new_states(self) -> Tensor:
        return self.q.new_empty(self.chunks, self.H, self.K, self.V)

    def scan(self, W: Tensor, Y: Tensor, initial: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The states before every chunk [chunks, H, K, V], the errors and the last state."""
        states, X = self.new_states(), self.new(self.V)
        final = torch.empty_like(initial, memory_format=torch.contiguous_format)
        grid, options = self._scan_grid(2 * self.K, stages=3)
        k, stride, RK = self.write
        gated_delta_scan_kernel[grid](
            (k, self.G, self.beta, W, Y), aligned(initial), (states, X, final), self.layout[:2], self.T, self.sizes,
            stride, RK=RK, **options,
        )  # fmt: skip
        return states, X, final

    def scan_back(self, do: Tensor, dfinal: Tensor, W: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of the states after every chunk, of beta X, and of the initial state."""
        dstates, dwrites = self.new_states(), self.new(self.V)
        dinitial = torch.empty_like(dfinal, memory_format=torch.contiguous_format)
        grid, options = self._scan_grid(3 * self.K + self.BT, stages=2)
        (q, s_q, RQ), (k, s_k, RK) = self.read, self.write
        gated_delta_scan_back_kernel[grid](
            (do, aligned(dfinal)), (q, k, self.G, self.beta, W, self.B), (dstates, dwrites, dinitial),
            self.layout[:2], scale, self.T, self.sizes, (s_q, s_k), RQ=RQ, RK=RK, **options,
        )  # fmt: skip
        return dstates, dwrites, dinitial


@taped
@flat(Inputs)
def gated_delta_fwd_triton(a: Inputs) -> tuple[Tensor, Tensor]:
    """Returns o [B, T, H, V] in q.dtype and the final states [N, H, K, V]."""
    launch = _Launch(a)
    _, W, Y = launch.solve(a.scale)
    states, X, final = launch.scan(W, Y, a.initial_state)
    o = launch.new(launch.V)
    q, stride, RQ = launch.read
    BV, num_stages = (launch.BV, 1) if launch.wide else (_block(launch.V, 128), 2)
    gated_delta_output_kernel[(cdiv(launch.V, BV) * launch.chunks, launch.H)](
        (q, launch.G, launch.beta), (states, X, launch.B), o, launch.layout, a.scale, launch.T, launch.sizes, stride,
        RQ=RQ, BK=launch.BK, BV=BV, CHANNELS=launch.channels, num_warps=4, num_stages=num_stages, **launch.shared,
    )  # fmt: skip
    return o, final


@taped
@flat(Upstream, Inputs)
def gated_delta_bwd_triton(upstream: Upstream, a: Inputs) -> tuple[Tensor, ...]:
    """Returns dq, dk, dv, dlog_decay, dbeta and the gradient of the initial states."""
    q, k, v, log_decay, beta, initial_state, _, scale = a
    do, launch = aligned(upstream.do), _Launch(a)
    solution, W, Y = launch.solve(scale)
    states, X, _ = launch.scan(W, Y, initial_state)
    dstates, dwrites, dinitial = launch.scan_back(do, upstream.dfinal, W, scale)
    dX, dA, dB = Y, launch.new(launch.BT), launch.new(launch.BT)  # Y is not read any more
    dbeta = torch.empty_like(beta, memory_format=torch.contiguous_format)
    gated_delta_bwd_errors_kernel[(launch.chunks, launch.H)](
        do, (launch.beta, launch.A, solution, X, dwrites), (dX, dA, dB, dbeta), launch.layout, scale, launch.T,
        launch.sizes, BV=launch.BV, APPLY=launch.apply, num_warps=4, num_stages=1, **launch.shared,
    )  # fmt: skip
    # of every head; where heads share, in fp32 until they are summed
    dq = launch.new(launch.K, dtype=q.dtype if launch.RQ == 1 else log_decay.dtype)
    dk = launch.new(launch.K, dtype=q.dtype if launch.RK == 1 else log_decay.dtype)
    # ptxas 12.8 takes descriptors from the wrong registers with 4 warps, or fewer channels, if decays are per head
    BK = launch.BK if launch.wide else 32 if launch.channels else 64 if launch.K <= 64 else 128
    blocks = cdiv(launch.K, BK)
    args = {"layout": launch.layout, "scale": scale, "T": launch.T, "strides": (launch.s_q, launch.s_k)}
    args |= {"RQ": launch.RQ, "RK": launch.RK, "BK": BK, "BV": launch.BV, **launch.shared}
    args |= {"num_warps": 4 if launch.channels else 8, "num_stages": 1}
    inputs, chunks = (launch.q, launch.k, launch.G, launch.beta), (X, dX, states, dstates)
    grid = (blocks * launch.chunks, launch.H)
    if launch.channels:
        dg = torch.empty_like(log_decay, memory_format=torch.contiguous_format)
        args |= {"sizes": launch.sizes, "BC": BLOCK, "SUMS": launch.exact}
        args["LIMIT"] = LIMIT_OF_FLOAT16 if q.dtype == torch.float16 else LIMIT
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
