"""Launches of Lattice's dual form ("enc" and "sim" with projection), with the arguments and results of launch.py."""

import torch
from torch import Tensor

from .._chunks import checkpoint_slots, chunk_table
from .._common import compute_dtype
from .._device import has_ptx
from .._groups import flat
from .._launch import accumulator, cdiv
from .._tape import taped
from .arguments import BACKWARD, FORWARD, Inputs, Kept, Rule, Save, Start, Upstream
from .kernels.dual.walk import lattice_gram_kernel, lattice_walk_kernel
from .kernels.dual.walk_back import lattice_gram_adjoint_kernel, lattice_walk_adjoint_kernel
from .kernels.dual.walk_back_by_token import lattice_careful_adjoint_kernel
from .kernels.dual.windows import lattice_read_adjoint_kernel, lattice_read_kernel, lattice_write_adjoint_kernel
from .kernels.dual.windows_by_levels import (
    lattice_read_adjoint_levels_kernel,
    lattice_read_levels_kernel,
    lattice_write_adjoint_levels_kernel,
)
from .sizes import CHECKPOINT, WALKED, dual_sizes, levels_precision, padded, precision, window_precision

# tokens per chunk of the walk forward (half as many where registers do not hold more), and of the walk back
CHUNK, CHUNK_BACK = 16, 8
# lanes that share a slot in the walk back token by token; warps per window of 64 x 64
LANES, WARPS = 4, 4
# registers per thread, so that three programs of such windows (16-bit inputs) share an SM
REGISTERS = 168
# programs that search for refused windows, and how many windows a program checks at once
PROGRAMS, AHEAD = 256, 32


class _Launch:
    """Sizes and grids. Forward keeps the states before every window and at the end, as rows of slots, and p."""

    def __init__(self, v: Tensor, state: Tensor, cu_seqlens: Tensor | None, variant: str):
        N, H, D, M = state.shape
        B, T = v.shape[:2]
        self.dtype = compute_dtype(v.dtype)
        self.sizes = dual_sizes(v, state, cu_seqlens)
        first = sequence = None
        windows = checkpoint_slots(B, T, cu_seqlens, CHECKPOINT)
        if cu_seqlens is not None:
            first, sequence, windows = chunk_table(cu_seqlens, T, CHECKPOINT)
        self.along, self.across = (cu_seqlens, first, T), (cu_seqlens, first, sequence, T, N)
        acc = accumulator(self.dtype)
        shared = {"H": H, "M": M, "D": D, "VARIANT": variant, "C": CHECKPOINT, "ACC": acc}
        form = precision(v.dtype)
        half = form == "tf32"
        chunk = CHUNK if half and D <= 64 else CHUNK // 2
        self.gram = {
            "H": H, "D": D, "BD": max(32, padded(D)), "C": CHECKPOINT, "P": chunk,
            "PRECISION": form, "ACC": acc, "num_warps": WARPS,
        }  # fmt: skip
        self.walk = {
            **shared, "MB": WALKED, "BD": padded(D), "P": chunk,
            "PRECISION": "split" if half else form, "num_warps": 1,
        }  # fmt: skip
        self.gram_back = {**self.gram, "P": CHUNK_BACK, "VARIANT": variant}
        self.back = {**self.walk, "P": CHUNK_BACK, "FETCH": has_ptx(v) and D <= 64}
        MB, D2 = 32 // LANES, 4 * LANES
        self.by_token = {
            **shared, "MB": MB, "D1": cdiv(D, D2), "D2": D2, "CHUNK": CHUNK_BACK, "num_warps": 1,
        }  # fmt: skip
        # rows of 128 bytes at least (kernels/README.md, "Traps")
        self.write = {
            **shared, "MB": 64, "BD": max(64, padded(D)), "PRECISION": window_precision(v), "num_warps": WARPS,
        }  # fmt: skip
        # only reads have this limit; writes would spill
        capped = self.write["PRECISION"] == "pairs" and D <= 64
        self.read = {**self.write, "maxnreg": REGISTERS} if capped else self.write
        self.levels = {
            **shared, "MB": 32, "BD": max(32, padded(D)), "LEVELS": CHECKPOINT.bit_length() - 1,
            "PRECISION": levels_precision(v), "PROGRAMS": PROGRAMS, "AHEAD": AHEAD, "num_warps": WARPS,
        }  # fmt: skip
        self.walks, self.walks_by_token = (N * H * cdiv(M, WALKED),), (N * H * cdiv(M, MB),)
        self.reads = (windows * H,)
        self.seekers = (min(windows * H, PROGRAMS),)

    def rows(self, state: Tensor) -> Tensor:
        return state.to(self.dtype).mT.contiguous()

    def products(self, v: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """|v|^2 of every token and head, gamma by windows, and v_t . v_j of all pairs in every chunk."""
        hh = v.new_empty(v.shape[:3], dtype=self.dtype)
        steps, gram = hh.new_empty(*self.reads, CHECKPOINT), hh.new_empty(*self.reads, CHECKPOINT, self.gram["P"])
        lattice_gram_kernel[self.reads](v, gamma, hh, gram, steps, self.across, **self.gram)
        return hh, steps, gram

    def products_back(self, do: Tensor, v: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """As `products`, with h_t . h_j and dy_t . h_j of all pairs in every chunk."""
        hh = v.new_empty(v.shape[:3], dtype=self.dtype)
        steps, gram = hh.new_empty(*self.reads, CHECKPOINT), hh.new_empty(*self.reads, CHECKPOINT, 2, CHUNK_BACK)
        lattice_gram_adjoint_kernel[self.reads](do, v, gamma, hh, gram, steps, self.across, **self.gram_back)
        return hh, steps, gram


@taped
@flat(*FORWARD)
def dual_fwd_triton(inputs: Inputs, start: Start, rule: Rule, save: Save):
    """o, the final state [N, H, d, m], and one buffer with the tensors for backward."""
    q, k, v, gamma, log_decay = inputs
    (initial_state, cu_seqlens), (save,) = start, save
    q, k, v, gamma = (x.contiguous() for x in (q, k, v, gamma))
    launch = _Launch(v, initial_state, cu_seqlens, rule.variant)
    start = launch.rows(initial_state)
    kept = start.new_empty(sum(launch.sizes))
    states, final, p = kept.split(launch.sizes)
    (hh, steps, gram), o = launch.products(v, gamma), torch.empty_like(v)
    lattice_walk_kernel[launch.walks]((k, v, steps, gram), start, (final, states, p), launch.along, **launch.walk)
    refused = torch.empty(launch.reads, dtype=torch.int32, device=v.device)
    read = (q, k, v, hh, gamma), (states, p), o
    lattice_read_kernel[launch.reads](*read, refused, launch.across, **launch.read)
    lattice_read_levels_kernel[launch.seekers](refused, refused.numel(), *read, launch.across, **launch.levels)
    return o, final.view(start.shape).mT, kept if save else kept.new_empty(0)


@taped
@flat(*BACKWARD)
def dual_bwd_triton(upstream: Upstream, inputs: Inputs, start: Start, kept: Kept, rule: Rule):
    """Gradients of q, k, v, gamma, log_decay and the initial state. That of log_decay is None: gamma contains the
    decay.
    """
    (initial_state, cu_seqlens), (kept,), dfinal = start, kept, upstream.dfinal
    do, q, k, v, gamma = (x.contiguous() for x in (upstream.do, *inputs[:4]))
    launch = _Launch(v, initial_state, cu_seqlens, rule.variant)
    states, final, p = kept.split(launch.sizes)
    hh, steps, gram = launch.products_back(do, v, gamma)
    dq, dk, dv, dgamma = (torch.empty_like(x) for x in (q, k, v, gamma))
    end = launch.rows(dfinal)
    reads, dalpha, z, ends, dstart = (torch.empty_like(x) for x in (p, p, p, states, end))
    flags, refused = torch.empty(2, *launch.reads, dtype=torch.int32, device=v.device)
    read = do, (k, v, hh, gamma), (states, p), (dq, reads)
    lattice_read_adjoint_kernel[launch.reads](*read, flags, refused, launch.across, **launch.read)
    lattice_read_adjoint_levels_kernel[launch.seekers](refused, refused.numel(), *read, launch.across, **launch.levels)
    upstream, inputs = (do, end), (q, k, v, hh, gamma)
    back = (states, final, p, reads, flags), (dalpha, z, ends, dstart), launch.along
    lattice_walk_adjoint_kernel[launch.walks](upstream, (q, k, v, steps, gram), *back, **launch.back)
    lattice_careful_adjoint_kernel[launch.walks_by_token](upstream, inputs, *back, **launch.by_token)
    write = do, inputs, (states, p, dalpha, z, ends), (dk, dv, dgamma)
    lattice_write_adjoint_kernel[launch.reads](*write, launch.across, **launch.write)
    lattice_write_adjoint_levels_kernel[launch.seekers](
        refused, refused.numel(), *write, launch.across, **launch.levels
    )
    return dq, dk, dv, dgamma, None, dstart.mT
