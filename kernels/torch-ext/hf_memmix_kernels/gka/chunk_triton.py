"""GKA in chunks on Triton: host side. Four launches forward and backward, one layout for batched and packed input.

Every launch sees tokens [total, H, ...] with `cu_seqlens`; a batch is the packed case of equal lengths. Chunk states
live in scratch [chunks, H, DK, ...] in the inputs' dtype; the recurrent states and all accumulators are float32.
"""

import functools

import torch
import triton

from .._chunks import chunk_table
from .bwd_kernels import gka_bwd_kernel_dkv, gka_bwd_kernel_scan, gka_bwd_kernel_solve
from .fwd_kernels import gka_fwd_kernel_scan, gka_fwd_kernel_solve
from .schedule import richardson_steps

SHARED_MEMORY_ROW = 256  # bytes of a state's row at which a chunk of 64 tokens just fits a multiprocessor
SCAN_TILE = 64
# (num_warps, num_stages) by kernel, for head sizes up to 64 and above; measured on an H200: gka/README.md
LAUNCH = {
    "fwd_scan": ((4, 3), (4, 3)),
    "fwd_solve": ((4, 1), (8, 1)),
    "bwd_solve": ((4, 1), (8, 1)),
    "bwd_scan": ((4, 2), (4, 2)),
    "bwd_dkv": ((4, 1), (8, 1)),
}


def launch_options(kernel: str, dim: int) -> dict[str, int]:
    """num_warps and num_stages of a kernel for a head size."""
    warps, stages = LAUNCH[kernel][dim > 64]
    return {"num_warps": warps, "num_stages": stages}


def chunk_length(dim: int, dtype: torch.dtype) -> int | None:
    """Tokens a chunk: 64, or 32 where a state twice as wide must fit beside it; None where no state fits."""
    row = triton.next_power_of_2(dim) * dtype.itemsize
    return 64 if row <= SHARED_MEMORY_ROW else 32 if row <= 2 * SHARED_MEMORY_ROW else None


@functools.lru_cache(maxsize=64)
def _batched_layout(batch: int, length: int, chunk: int, device: torch.device):
    cu_seqlens = torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=device)
    chunks = triton.cdiv(length, chunk)
    first = torch.arange(0, (batch + 1) * chunks, chunks, dtype=torch.int32, device=device)
    sequence = torch.arange(batch * chunks, device=device, dtype=torch.int32) // chunks
    return cu_seqlens, first, sequence, batch * chunks


@functools.lru_cache(maxsize=64)
def _schedule(phases: tuple[int, ...], ridge: float, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """All phases' steps, one after the other, float32, and each phase's iteration count, int32."""
    steps = [tau for count in phases for tau in richardson_steps(count, ridge)]
    return torch.tensor(steps, device=device), torch.tensor(phases, dtype=torch.int32, device=device)


class _Launch:
    """Sizes, scratch and the arguments that all kernels of one call share."""

    def __init__(self, q, k, v, cu_seqlens, phases, ridge):
        batch, length, self.H, self.D = q.shape
        self.total, self.Hk, self.Dv = batch * length, k.shape[2], v.shape[-1]
        self.C = chunk_length(max(self.D, self.Dv), q.dtype)
        if cu_seqlens is None:
            self.cu, self.first, self.sequence, self.chunks = _batched_layout(batch, length, self.C, q.device)
        else:
            self.cu = cu_seqlens.to(torch.int32)
            self.first, self.sequence, self.chunks = chunk_table(self.cu, self.total, self.C)
        self.N = self.cu.numel() - 1
        self.DK, self.DV = (max(16, triton.next_power_of_2(d)) for d in (self.D, self.Dv))
        self.phases, self.ridge = tuple(phases), ridge
        # few sequences: smaller tiles, so that the sequential scans still fill the GPU
        self.tile = min(SCAN_TILE if self.N * self.H >= 32 else 32, self.DK, self.DV)
        self.tiles = (triton.cdiv(self.DK, self.tile), triton.cdiv(max(self.DK, self.DV), self.tile))
        self.q = q

    def scratch(self, width):
        return self.q.new_empty(self.chunks, self.H, self.DK, width)

    @property
    def sizes(self):
        return {"H": self.H, "HK": self.Hk, "D": self.D, "DVR": self.Dv, "DK": self.DK, "DV": self.DV, "C": self.C}

    @property
    def solver(self):
        steps, counts = _schedule(self.phases, self.ridge, self.q.device)
        return {"steps": steps, "counts": counts, "ridge": self.ridge, "PHASES": len(self.phases)}

    def scan_states(self, k, v, log_decay, beta, h0, u0):
        """Scratch H0 [chunks, H, DK, DK], U0^T [chunks, H, DK, DV], and the final states."""
        H0, UT0 = self.scratch(self.DK), self.scratch(self.DV)
        h_final, u_final = torch.empty_like(h0), torch.empty_like(u0)
        gka_fwd_kernel_scan[(self.tiles[0] * self.tiles[1], self.N * self.H)](
            k, v, log_decay, beta, h0, u0, H0, UT0, h_final, u_final, self.cu, self.first,
            **self.sizes, BI=self.tile, BJ=self.tile, TILES_J=self.tiles[1], **launch_options("fwd_scan", self.D),
        )  # fmt: skip
        return H0, UT0, h_final, u_final


def gka_forward(q, k, v, log_decay, alpha, beta, h0, u0, cu_seqlens, phases, ridge, scale, chunk_size):
    """(o in q's dtype, x float32, final H, final U); the chunk length is the kernels' own, it changes no result."""
    q, k, v, log_decay, alpha, beta, h0, u0 = (t.contiguous() for t in (q, k, v, log_decay, alpha, beta, h0, u0))
    launch = _Launch(q, k, v, cu_seqlens, phases, ridge)
    H0, UT0, h_final, u_final = launch.scan_states(k, v, log_decay, beta, h0, u0)
    o = q.new_empty(*q.shape[:3], v.shape[-1])
    x = torch.empty_like(q, dtype=torch.float32)
    gka_fwd_kernel_solve[(launch.H, launch.chunks)](
        q, k, v, log_decay, alpha, beta, H0, UT0, o, x, launch.cu, launch.first, launch.sequence, launch.N, scale,
        **launch.solver, **launch.sizes, **launch_options("fwd_solve", launch.D),
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

    z, dq = torch.empty_like(q), torch.empty_like(q)
    dalpha, ridge_t, from_start, local = (torch.empty_like(log_decay) for _ in range(4))
    gka_bwd_kernel_solve[(launch.H, launch.chunks)](
        q, k, v, log_decay, alpha, beta, H0, UT0, x, do, z, dq, dalpha, ridge_t, from_start, local,
        launch.cu, launch.first, launch.sequence, launch.N, scale,
        **launch.solver, **launch.sizes, **launch_options("bwd_solve", launch.D),
    )  # fmt: skip

    E, RT = launch.scratch(launch.DK), launch.scratch(launch.DV)
    carried = log_decay.new_zeros(launch.chunks, launch.H, launch.tiles[0] * launch.tiles[1])
    dh0, du0 = torch.empty_like(h0), torch.empty_like(u0)
    gka_bwd_kernel_scan[(launch.tiles[0] * launch.tiles[1], launch.N * launch.H)](
        q, k, log_decay, alpha, beta, H0, UT0, x, do, z, ridge_t, from_start, dh_final, du_final, h_final, u_final,
        E, RT, carried, dh0, du0, launch.cu, launch.first, scale,
        **launch.sizes, BI=launch.tile, BJ=launch.tile, TILES_J=launch.tiles[1],
        **launch_options("bwd_scan", launch.D),
    )  # fmt: skip
    del UT0  # before dk and dv: peak memory

    per_head = (*q.shape[:3],)
    dk, dv = q.new_empty(*per_head, launch.D), q.new_empty(*per_head, launch.Dv)
    dg, dbeta = torch.empty_like(log_decay), torch.empty_like(beta)
    gka_bwd_kernel_dkv[(launch.H, launch.chunks)](
        q, k, v, log_decay, alpha, beta, H0, x, do, z, ridge_t, from_start, local, E, RT, carried.sum(-1),
        dk, dv, dg, dbeta, launch.cu, launch.first, launch.sequence, launch.N, scale,
        **launch.sizes, **launch_options("bwd_dkv", launch.D),
    )  # fmt: skip
    if launch.Hk != launch.H:
        dk, dv = (t.unflatten(2, (launch.Hk, -1)).sum(3) for t in (dk, dv))
    return dq, dk, dv, dg, dalpha, dbeta, dh0, du0
