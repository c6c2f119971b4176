"""Launches of the GKA kernels. One layout serves batched and packed input.

Tokens are seen as [total, H, ...]. Chunk states lie in scratch memory [chunks, H, DK, DK] in the dtype of the inputs;
recurrent states and all accumulators are float32. Where keys are narrower than values, the kernels that read H alone
read its part [DS, DS], in which all keys lie. Nothing stays on the device between calls, so a CUDA graph may
capture every call.
"""

import torch

from .._chunks import chunk_table
from .._common import FLOOR
from .._device import has_ptx
from .._groups import flat
from .._launch import accumulator, cdiv, next_power_of_2, page_strides
from .._tape import taped
from .arguments import BACKWARD, FORWARD, STEP, Chunks, Inputs, Packing, Pages, Solver, States
from .kernels.backward import gka_bwd_kernel_dk, gka_bwd_kernel_dv, gka_bwd_kernel_read, gka_bwd_kernel_ridge
from .kernels.forward import gka_fwd_kernel_read
from .kernels.scan import gka_bwd_kernel_scan, gka_fwd_kernel_scan
from .kernels.solve import gka_kernel_solve, gka_kernel_steps
from .kernels.solve_wide import gka_kernel_solve_wide
from .kernels.step import gka_step_kernel
from .schedule import gradient_phases, richardson_steps

SMALL_ROW = 256  # bytes of a row of float32 states at which a chunk of 64 tokens just fits a multiprocessor
ROWS_OF_TILE, COLUMNS_OF_TILE = 128, 64  # of the forward scan; the backward scan has square tiles
BLOCK = 64  # columns that the backward kernels read at a time
SCAN_PROGRAMS = 256  # with fewer programs a scan leaves multiprocessors idle
MAX_PARTS, CHUNKS_OF_PART = 32, 8
# (num_warps, num_stages) by kernel, for head sizes up to 64, 128 and 256; measured on an H200: README.md
LAUNCH = {
    "fwd_scan": ((4, 3), (4, 3), (4, 3)),
    "solve": ((4, 1), (4, 1), (8, 1)),
    "fwd_read": ((4, 1), (4, 1), (8, 1)),
    "bwd_read": ((4, 1), (4, 1), (8, 1)),
    "ridge": ((4, 1), (4, 1), (8, 1)),
    "bwd_scan": ((4, 2), (4, 2), (4, 2)),
    "bwd_dv": ((4, 2), (4, 2), (8, 2)),
    "bwd_dk": ((4, 2), (4, 2), (8, 2)),
}


def chunk_length(dim: int, dtype: torch.dtype) -> int | None:
    """Tokens per chunk: 64, or 32 if the state is twice as wide and must fit too; None if no state fits.

    In 16 bits a chunk always has 64 tokens: the tensor cores of an H200 take no fewer rows.
    """
    if dtype.itemsize == 2:
        return 64
    row = next_power_of_2(dim) * dtype.itemsize
    return 64 if row <= SMALL_ROW else 32 if row <= 2 * SMALL_ROW else None


class _Launch:
    """Sizes, scratch and the arguments that the kernels of one call share."""

    def __init__(self, q, k, v, cu_seqlens, solver: Solver):
        batch, length, self.H, self.D = q.shape
        self.q, self.HK, self.DVR = q, k.shape[2], v.shape[-1]
        self.C = chunk_length(max(self.D, self.DVR), q.dtype)
        # states are square: at some unequal sizes ptxas 12.8 reads operands from a register that it never wrote
        self.DK = max(16, next_power_of_2(max(self.D, self.DVR)))
        self.DS = max(16, next_power_of_2(self.D))
        self.phases, self.ridge = tuple(solver.phases), solver.ridge
        self.wide = self.DS > 128  # the solver parks solutions in memory
        per_sequence = cdiv(length, self.C)
        if cu_seqlens is None:
            self.N, self.chunks = batch, batch * per_sequence
            cu = first = sequence = None
        else:
            self.N, cu = cu_seqlens.numel() - 1, cu_seqlens.to(torch.int32)
            first, sequence, self.chunks = chunk_table(cu, batch * length, self.C)
        self.by_sequence = (cu, first), length, per_sequence
        self.by_chunk = (cu, first, sequence), self.N, length, per_sequence
        heads = {"H": self.H, "D": self.D, "DK": self.DK, "C": self.C}
        self.narrow = {**heads, "DS": self.DS}  # of the kernels that read H alone
        self.sizes = {**heads, "HK": self.HK, "DVR": self.DVR}
        self.blocks = {**self.sizes, "BLOCK": min(BLOCK, self.DK)}
        # all grids have one dimension: the others are limited to 65535, and there may be more sequences or chunks
        self.chunk_grid = (self.chunks * self.H,)

    def options(self, kernel: str, width: int | None = None) -> dict[str, int]:
        """num_warps and num_stages of a kernel, for a state of `width`, DK by default."""
        width = self.DK if width is None else width
        warps, stages = LAUNCH[kernel][(width > 64) + (width > 128)]
        return {"num_warps": warps, "num_stages": stages}

    def scratch(self) -> torch.Tensor:
        return self.q.new_empty(self.chunks, self.H, self.DK, self.DK)

    def gates(self, count: int) -> list[torch.Tensor]:
        return [self.q.new_empty(self.q.shape[:3], dtype=torch.float32) for _ in range(count)]

    def tile(self, kernel: str) -> tuple[int, int]:
        """Rows and columns of a scan's tile."""
        rows = ROWS_OF_TILE if kernel == "fwd_scan" else COLUMNS_OF_TILE
        return min(rows, self.DK), min(COLUMNS_OF_TILE, self.DK)

    def scan(self, function, kernel: str, arguments: tuple, numbers: tuple = ()) -> None:
        """Launch a scan: at once, or in parts of the sequences if there are few of them.

        The kernel takes `arguments` first, and `numbers` last.
        """
        TI, TJ = self.tile(kernel)
        options = self.options(kernel)
        sizes = {**self.sizes, "TI": TI, "TJ": TJ, "STAGES": options["num_stages"], **options}
        heads = self.N * self.H
        programs = 2 * (self.DK // TI) * (self.DK // TJ) * heads
        parts = max(1, min(SCAN_PROGRAMS // programs, self.chunks // self.N // CHUNKS_OF_PART, MAX_PARTS))
        if 2 * programs > SCAN_PROGRAMS:
            parts = 1
        added = self.q.new_empty(heads, parts, 2, self.DK, self.DK, dtype=torch.float32) if parts > 1 else None
        decays = self.q.new_empty(heads, parts, dtype=torch.float32) if parts > 1 else None
        for sums in (True, False) if parts > 1 else (False,):
            function[(programs * parts,)](
                *arguments, (added, decays), *self.by_sequence, parts, *numbers, **sizes, SUMS=sums
            )

    def scan_states(self, k, v, log_decay, beta, h0, u0):
        """Scratch H0 and U0^T [chunks, H, DK, DK], and the final states."""
        H0, UT0 = self.scratch(), self.scratch()
        h_final, u_final = torch.empty_like(h0), torch.empty_like(u0)
        tensors = (k, v, log_decay, beta), (h0, u0), (H0, UT0), (h_final, u_final)
        self.scan(gka_fwd_kernel_scan, "fwd_scan", tensors)
        return H0, UT0, h_final, u_final

    def solve(self, phases, rhs: tuple, matrix: tuple, x, parked):
        """Write the solution for factor * (high + low) into x; returns |H_t| [B, T, H].

        `rhs` is (high, low, factor), `matrix` (k, log_decay, beta, H0).

        `parked` is memory for q.numel() float32 numbers, which only the solver of wide states uses; it may be x.
        """
        (norms,) = self.gates(1)
        steps = [tau for count in phases for tau in richardson_steps(count, self.ridge)]
        table = norms.new_empty(len(phases) + len(steps))
        gka_kernel_steps[(1,)](table, VALUES=(*map(float, phases), *steps), num_warps=1)
        sizes = {"PHASES": len(phases), **self.narrow, "HK": self.HK, **self.options("solve", self.DS)}
        if self.wide:
            gka_kernel_solve_wide[self.chunk_grid](
                rhs, matrix, (x, parked, norms), *self.by_chunk, table, self.ridge, **sizes
            )
        else:
            gka_kernel_solve[self.chunk_grid](rhs, matrix, x, norms, *self.by_chunk, table, self.ridge, **sizes)
        return norms


@taped
@flat(*FORWARD)
def gka_forward(inputs: Inputs, states: States, packing: Packing, solver: Solver, chunks: Chunks):
    """(o in q's dtype, x float32, final H, final U). The kernels choose the chunk length, `chunk_size` is not used."""
    q, k, v, log_decay, alpha, beta, h0, u0 = (t.contiguous() for t in (*inputs, *states))
    log_decay = log_decay.clamp_min(FLOOR[log_decay.dtype])
    launch = _Launch(q, k, v, packing.cu_seqlens, solver)
    H0, UT0, h_final, u_final = launch.scan_states(k, v, log_decay, beta, h0, u0)
    x = torch.empty_like(q, dtype=torch.float32)
    launch.solve(launch.phases, (q, None, None), (k, log_decay, beta, H0), x, x)
    o = q.new_empty(*q.shape[:3], v.shape[-1])
    gka_fwd_kernel_read[launch.chunk_grid](
        (q, k, v, log_decay, alpha, beta), UT0, x, o, *launch.by_chunk, solver.scale,
        **launch.sizes, **launch.options("fwd_read"),
    )  # fmt: skip
    return o, x, h_final, u_final


@taped
@flat(*BACKWARD)
def gka_backward(upstream, inputs, states, kept, packing, solver, chunks):
    """Gradients (dq, dk, dv, dlog_decay, dalpha, dbeta, dh0, du0); the chunk states are computed again."""
    do, dh_final, du_final, q, k, v, log_decay, alpha, beta, h0, u0, x = (
        t.contiguous() for t in (*upstream, *inputs, *states, *kept)
    )
    phases, ridge, scale = solver
    log_decay = log_decay.clamp_min(FLOOR[log_decay.dtype])
    launch = _Launch(q, k, v, packing.cu_seqlens, solver)
    H0, UT0, *_ = launch.scan_states(k, v, log_decay, beta, h0, u0)

    # to save memory, dq and z first hold the high and low part of the solver's right side, and E what it parks
    dq, z = torch.empty_like(q), torch.empty_like(q)
    low = None if q.dtype == torch.float32 else z
    dalpha, local, ridge_t, from_start = launch.gates(4)
    inputs = q, k, v, log_decay, alpha, beta
    gka_bwd_kernel_read[launch.chunk_grid](
        inputs, UT0, x, do, (dq, low, dalpha, local), *launch.by_chunk, scale,
        **launch.sizes, **launch.options("bwd_read"),
    )  # fmt: skip
    size = launch.chunks * launch.H * launch.DK**2
    memory = q.new_empty(max(size, 2 * q.numel()) if launch.wide else size)
    E, parked = memory[:size], memory.view(torch.float32) if launch.wide else None
    norms = launch.solve(gradient_phases(phases), (dq, low, alpha), (k, log_decay, beta, H0), z, parked)
    decayed_x = torch.empty_like(q)
    gka_bwd_kernel_ridge[launch.chunk_grid](
        (log_decay, alpha), (H0, x, z, dq, norms), (dq, decayed_x, ridge_t, from_start, local),
        *launch.by_chunk, ridge, **launch.narrow, **launch.options("ridge", launch.DS),
    )  # fmt: skip

    TI, TJ = launch.tile("bwd_scan")
    shares = 2 * (launch.DK // TI) * (launch.DK // TJ)
    carried = log_decay.new_empty(launch.chunks, launch.H, shares)
    dh0, du0 = torch.empty_like(h0), torch.empty_like(u0)
    tensors = (
        (q, k, log_decay, alpha, beta), (H0, UT0), (z, decayed_x, do, ridge_t, from_start), (dh_final, du_final),
        (E, carried), (dh0, du0),
    )  # fmt: skip
    launch.scan(gka_bwd_kernel_scan, "bwd_scan", tensors, (scale,))
    RT = UT0  # its new content
    del decayed_x  # freed before dk and dv are allocated, for a lower peak of memory

    dk, dv = torch.empty_like(q), q.new_empty(*q.shape[:3], launch.DVR)
    dg, dbeta, later = launch.gates(3)
    gka_bwd_kernel_dv[launch.chunk_grid](
        inputs, (x, do), RT, (dv, later), *launch.by_chunk, scale, **launch.blocks, **launch.options("bwd_dv"),
    )  # fmt: skip
    gka_bwd_kernel_dk[launch.chunk_grid](
        inputs, (x, do, z, ridge_t, from_start), (H0, E, RT), (local, later, carried), (dk, dg, dbeta),
        *launch.by_chunk, scale, **launch.blocks, SHARES=shares, **launch.options("bwd_dk"),
    )  # fmt: skip
    if launch.HK != launch.H:
        dk, dv = (t.unflatten(2, (launch.HK, -1)).sum(3) for t in (dk, dv))
    return dq, dk, dv, dg, dalpha, dbeta, dh0, du0


@taped
@flat(*STEP)
def gka_step_triton(inputs: Inputs, states: States, pages: Pages, solver: Solver) -> torch.Tensor:
    """Advance (h, u), or their pages, in place by the one token of q, k, v [B, 1, heads, D].

    Returns o [B, 1, H, Dv] in q's dtype.
    """
    (q, k, v, *_), (phases, ridge, scale) = inputs, solver
    batch, _, heads, D = q.shape
    V = v.shape[-1]
    o = q.new_empty(batch, 1, heads, V)
    BD, BV = next_power_of_2(D), min(64 if D > 128 else 128, next_power_of_2(V))
    # one column of H per thread; half a column at D = 256, where H fills the registers of a multiprocessor
    num_warps = max(1, BD // 32) if BD <= 128 else BD // 16
    # there the iterations of 16-bit models use H in 16 bits, if a later phase corrects it
    low = BD > 128 and q.element_size() == 2 and len(phases) > 1
    gka_step_kernel[(batch * heads,)](
        *(t.contiguous() for t in inputs), *states,
        pages.state_indices, *page_strides(pages.state_indices, *states), o, float(ridge), float(scale), heads,
        D=D, V=V, GROUPS=heads // k.shape[2], PHASES=tuple(phases), BD=BD, BV=BV,
        LOW=low, ASM=has_ptx(q), ACC=accumulator(states.h.dtype), num_warps=num_warps,
    )  # fmt: skip
    return o
