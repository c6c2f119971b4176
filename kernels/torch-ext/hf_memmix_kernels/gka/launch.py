"""Launches of the GKA kernels. One layout serves batched and packed input.

Tokens are seen as [total, H, ...]. Chunk states lie in scratch memory [chunks, H, DK, DK] in the dtype of the inputs;
recurrent states and all accumulators are float32. Nothing stays on the device between calls, so a CUDA graph may
capture every call.
"""

import torch

from .._chunks import chunk_table
from .._launch import accumulator, cdiv, next_power_of_2, page_strides
from .kernels.backward import gka_bwd_kernel_dkv, gka_bwd_kernel_read, gka_bwd_kernel_ridge, gka_bwd_kernel_scan
from .kernels.forward import gka_fwd_kernel_read, gka_fwd_kernel_scan
from .kernels.solve import gka_kernel_solve, gka_kernel_steps
from .kernels.step import gka_step_kernel
from .schedule import richardson_steps

SHARED_MEMORY_ROW = 256  # bytes of a state's row at which a chunk of 64 tokens just fits a multiprocessor
SCAN_TILE = 64
# (num_warps, num_stages) by kernel, for head sizes up to 64 and above; measured on an H200: README.md
LAUNCH = {
    "fwd_scan": ((4, 3), (4, 3)),
    "solve": ((4, 1), (4, 1)),
    "fwd_read": ((4, 1), (4, 1)),
    "bwd_read": ((4, 1), (4, 1)),
    "ridge": ((4, 1), (4, 1)),
    "bwd_scan": ((4, 2), (4, 2)),
    "bwd_dkv": ((4, 1), (4, 1)),
}


def chunk_length(dim: int, dtype: torch.dtype) -> int | None:
    """Tokens per chunk: 64, or 32 if the state is twice as wide and must fit too; None if no state fits."""
    row = next_power_of_2(dim) * dtype.itemsize
    return 64 if row <= SHARED_MEMORY_ROW else 32 if row <= 2 * SHARED_MEMORY_ROW else None


class _Launch:
    """Sizes, scratch and the arguments that the kernels of one call share."""

    def __init__(self, q, k, v, cu_seqlens, phases, ridge):
        batch, length, self.H, self.D = q.shape
        self.q, self.HK, self.DVR = q, k.shape[2], v.shape[-1]
        self.C = chunk_length(max(self.D, self.DVR), q.dtype)
        # states are square: at some unequal sizes ptxas 12.8 reads operands from a register that it never wrote
        self.DK = max(16, next_power_of_2(max(self.D, self.DVR)))
        self.phases, self.ridge = tuple(phases), ridge
        per_sequence = cdiv(length, self.C)
        if cu_seqlens is None:
            self.N, self.chunks = batch, batch * per_sequence
            cu = first = sequence = None
        else:
            self.N, cu = cu_seqlens.numel() - 1, cu_seqlens.to(torch.int32)
            first, sequence, self.chunks = chunk_table(cu, batch * length, self.C)
        self.by_sequence = (cu, first), length, per_sequence
        self.by_chunk = (cu, first, sequence), self.N, length, per_sequence
        self.heads = {"H": self.H, "D": self.D, "DK": self.DK, "C": self.C}
        self.sizes = {**self.heads, "HK": self.HK, "DVR": self.DVR}
        # with few sequences tiles are smaller, so that the sequential scans still fill the GPU
        tile = min(SCAN_TILE if self.N * self.H >= 32 else 32, self.DK)
        self.tiles = {"TILE": tile}
        self.tile_count = (self.DK // tile) ** 2
        # all grids have one dimension: the others are limited to 65535, and there may be more sequences or chunks
        self.scan_grid = (self.tile_count * self.N * self.H,)
        self.chunk_grid = (self.chunks * self.H,)

    def options(self, kernel: str) -> dict[str, int]:
        """num_warps and num_stages of a kernel."""
        warps, stages = LAUNCH[kernel][self.D > 64]
        return {"num_warps": warps, "num_stages": stages}

    def scratch(self, more: int = 0) -> torch.Tensor:
        return self.q.new_empty(self.chunks + more, self.H, self.DK, self.DK)

    def gates(self, count: int) -> list[torch.Tensor]:
        return [self.q.new_empty(self.q.shape[:3], dtype=torch.float32) for _ in range(count)]

    def scan_states(self, k, v, log_decay, beta, h0, u0):
        """Scratch H0 [chunks, H, DK, DK], U0^T [chunks + N, H, DK, DK], and the final states."""
        H0, UT0 = self.scratch(), self.scratch(more=self.N)
        h_final, u_final = torch.empty_like(h0), torch.empty_like(u0)
        gka_fwd_kernel_scan[self.scan_grid](
            (k, v, log_decay, beta), (h0, u0), (H0, UT0), (h_final, u_final), *self.by_sequence,
            **self.sizes, **self.tiles, **self.options("fwd_scan"),
        )  # fmt: skip
        return H0, UT0, h_final, u_final

    def solve(self, high, low, factor, k, log_decay, beta, H0, x):
        """Write the solution for factor * (high + low) into x; returns |H_t| [B, T, H]."""
        (norms,) = self.gates(1)
        steps = [tau for count in self.phases for tau in richardson_steps(count, self.ridge)]
        table = norms.new_empty(len(self.phases) + len(steps))
        gka_kernel_steps[(1,)](table, VALUES=(*map(float, self.phases), *steps), num_warps=1)
        gka_kernel_solve[self.chunk_grid](
            (high, low, factor), (k, log_decay, beta, H0), x, norms, *self.by_chunk, table, self.ridge,
            PHASES=len(self.phases), **self.heads, HK=self.HK, **self.options("solve"),
        )  # fmt: skip
        return norms


def gka_forward(q, k, v, log_decay, alpha, beta, h0, u0, cu_seqlens, phases, ridge, scale, chunk_size):
    """(o in q's dtype, x float32, final H, final U). The kernels choose the chunk length, `chunk_size` is not used."""
    q, k, v, log_decay, alpha, beta, h0, u0 = (t.contiguous() for t in (q, k, v, log_decay, alpha, beta, h0, u0))
    launch = _Launch(q, k, v, cu_seqlens, phases, ridge)
    H0, UT0, h_final, u_final = launch.scan_states(k, v, log_decay, beta, h0, u0)
    x = torch.empty_like(q, dtype=torch.float32)
    launch.solve(q, None, None, k, log_decay, beta, H0, x)
    o = q.new_empty(*q.shape[:3], v.shape[-1])
    gka_fwd_kernel_read[launch.chunk_grid](
        (q, k, v, log_decay, alpha, beta), UT0, x, o, *launch.by_chunk, scale,
        **launch.sizes, **launch.options("fwd_read"),
    )  # fmt: skip
    return o, x, h_final, u_final


def gka_backward(
    do, dh_final, du_final, q, k, v, log_decay, alpha, beta, h0, u0, x, cu_seqlens, phases, ridge, scale, chunk_size
):
    """Gradients (dq, dk, dv, dlog_decay, dalpha, dbeta, dh0, du0); the chunk states are computed again."""
    do, dh_final, du_final, q, k, v, log_decay, alpha, beta, h0, u0, x = (
        t.contiguous() for t in (do, dh_final, du_final, q, k, v, log_decay, alpha, beta, h0, u0, x)
    )
    launch = _Launch(q, k, v, cu_seqlens, phases, ridge)
    H0, UT0, h_final, u_final = launch.scan_states(k, v, log_decay, beta, h0, u0)

    # to save memory, dq and z first hold the high and low part of the solver's right side
    dq, z = torch.empty_like(q), torch.empty_like(q)
    low = None if q.dtype == torch.float32 else z
    dalpha, local, ridge_t, from_start = launch.gates(4)
    inputs = q, k, v, log_decay, alpha, beta
    gka_bwd_kernel_read[launch.chunk_grid](
        inputs, UT0, x, do, (dq, low, dalpha, local), *launch.by_chunk, scale,
        **launch.sizes, **launch.options("bwd_read"),
    )  # fmt: skip
    norms = launch.solve(dq, low, alpha, k, log_decay, beta, H0, z)
    decayed_x, decayed_m = torch.empty_like(q), torch.empty_like(q)
    gka_bwd_kernel_ridge[launch.chunk_grid](
        (q, k, log_decay, alpha, beta), (H0, x, z, dq, norms),
        (dq, decayed_x, decayed_m, ridge_t, from_start, local), *launch.by_chunk, ridge, scale,
        **launch.heads, HK=launch.HK, **launch.options("ridge"),
    )  # fmt: skip

    E = launch.scratch()
    carried = log_decay.new_empty(launch.chunks, launch.H, launch.tile_count)
    dh0, du0 = torch.empty_like(h0), torch.empty_like(u0)
    gka_bwd_kernel_scan[launch.scan_grid](
        (k, log_decay, beta), (H0, UT0), (z, decayed_x, decayed_m, do, ridge_t, from_start),
        (dh_final, du_final), (h_final, u_final), (E, carried), (dh0, du0), *launch.by_sequence,
        **launch.sizes, **launch.tiles, **launch.options("bwd_scan"),
    )  # fmt: skip
    RT = UT0  # its new content
    del decayed_x, decayed_m  # freed before dk and dv are allocated, for a lower peak of memory

    dk, dv = torch.empty_like(q), q.new_empty(*q.shape[:3], launch.DVR)
    dg, dbeta = launch.gates(2)
    gka_bwd_kernel_dkv[launch.chunk_grid](
        inputs, (H0, x, do, z, ridge_t, from_start, local), (E, RT, carried), (dk, dv, dg, dbeta),
        *launch.by_chunk, scale, **launch.sizes, TILES=launch.tile_count,
        **launch.options("bwd_dkv"),
    )  # fmt: skip
    if launch.HK != launch.H:
        dk, dv = (t.unflatten(2, (launch.HK, -1)).sum(3) for t in (dk, dv))
    return dq, dk, dv, dg, dalpha, dbeta, dh0, du0


def gka_step_triton(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    alpha: torch.Tensor,
    beta: torch.Tensor,
    h: torch.Tensor,
    u: torch.Tensor,
    state_indices: torch.Tensor | None,
    phases: list[int],
    ridge: float,
    scale: float,
) -> torch.Tensor:
    """Advance (h, u), or their pages, in place by the one token of q, k, v [B, 1, heads, D].

    Returns o [B, 1, H, Dv] in q's dtype.
    """
    batch, _, heads, D = q.shape
    V = v.shape[-1]
    o = q.new_empty(batch, 1, heads, V)
    BD, BV = next_power_of_2(D), min(128, next_power_of_2(V))
    # one column of H per thread; half a column at D = 256, where H fills the registers of a multiprocessor
    num_warps = max(1, BD // 32) if BD <= 128 else BD // 16
    gka_step_kernel[(batch * heads,)](
        *(t.contiguous() for t in (q, k, v, log_decay, alpha, beta)), h, u,
        state_indices, *page_strides(state_indices, h, u), o, float(ridge), float(scale), heads,
        D=D, V=V, GROUPS=heads // k.shape[2], PHASES=tuple(phases), BD=BD, BV=BV,
        ACC=accumulator(h.dtype), num_warps=num_warps,
    )  # fmt: skip
    return o
