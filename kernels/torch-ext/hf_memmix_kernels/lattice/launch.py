"""Launches of Lattice's sequential kernels: states to tiles and back, grids, scratch memory."""

import torch
from torch import Tensor

from .._chunks import checkpoint_slots, chunk_table
from .._device import has_ptx
from .._groups import flat
from .._launch import accumulator, cdiv, page_strides
from .._tape import taped
from .arguments import BACKWARD, FORWARD, STEP, Inputs, Kept, Pages, Rule, Save, Start, Upstream
from .kernels.sequential.backward import lattice_bwd_kernel
from .kernels.sequential.dec_backward import lattice_adjoint_kernel, lattice_middle_kernel
from .kernels.sequential.dec_backward_windows import (
    lattice_rule_kernel,
    lattice_slots_kernel,
    lattice_slots_levels_kernel,
)
from .kernels.sequential.forward import lattice_fwd_kernel
from .kernels.sequential.step import lattice_step_kernel
from .launch_cuda import can_walk_back, walk_back
from .sizes import CHECKPOINT, keeps_h, kept_sizes, levels_precision, padded, window_precision

# tokens between two measurements of the norms, and between two states that backward keeps in scratch memory
BLOCK = 16
# lanes that share a slot, and warps per head of size 64 x 64
LANES_FWD = LANES_BWD = 8
WARPS_FWD = WARPS_BWD = 4
# pairs of a token and a head per program that computes coefficients
ROWS = 32


def _sizes(state: Tensor, lanes: int) -> dict:
    N, H, D, M = state.shape
    BD = padded(D)
    D2 = min(BD, 4 * lanes)
    return {"M": M, "D": D, "BM": padded(M), "D1": BD // D2, "D2": D2, "ACC": accumulator(state.dtype)}


def _split(warps: int, sizes: dict) -> dict:
    """How slots are distributed over warps and lanes, and how many tokens registers hold
    (kernels/sequential/tiles.py).
    """
    group = 4 if sizes["BM"] * sizes["D1"] * sizes["D2"] <= 4096 else 1
    return {"WARPS": warps, "LANES": 32 // (sizes["D2"] // 4), "GROUP": group, "num_warps": warps}


def _warps(warps: int, state: Tensor) -> int:
    """Number of warps; larger states get more, because their registers hold the state."""
    tile = padded(state.shape[2]) * padded(state.shape[3])
    return max(1, min(8, warps * tile // 4096))


def _to_tiles(state: Tensor, sizes: dict) -> Tensor:
    """[N, H, d, m] -> [N * H, BM, BD], slots as rows, zero-padded."""
    rows = state.flatten(0, 1).mT
    return torch.nn.functional.pad(
        rows, (0, sizes["D1"] * sizes["D2"] - sizes["D"], 0, sizes["BM"] - sizes["M"])
    ).contiguous()


def _from_tiles(tiles: Tensor, like: Tensor) -> Tensor:
    """The inverse of `_to_tiles`."""
    return tiles[:, : like.shape[3], : like.shape[2]].mT.reshape(like.shape)


@taped
@flat(*FORWARD)
def lattice_fwd_triton(inputs: Inputs, start: Start, rule: Rule, save: Save):
    """o, the final state [N, H, d, m] and, in one buffer, the tensors for backward (`kept_sizes`)."""
    q, k, v, gamma, log_decay = inputs
    (initial_state, cu_seqlens), (save,) = start, save
    N, H, _, _ = initial_state.shape
    sizes = _sizes(initial_state, LANES_FWD)
    q, k, v, gamma = (x.contiguous() for x in (q, k, v, gamma))
    log_decay = None if log_decay is None else log_decay.contiguous()
    start = _to_tiles(initial_state, sizes)
    final, o = torch.empty_like(start), torch.empty_like(v)
    kept = start.new_empty(sum(kept_sizes(v, initial_state, cu_seqlens, rule)) if save else 0)
    h = p = None
    if keeps_h(*rule):
        h, p = kept.split(kept_sizes(v, initial_state, cu_seqlens, rule))[1:] if save else (start, start)
    lattice_fwd_kernel[(N * H,)](
        (q, k, v, gamma, log_decay), start, (o, final), (kept, h, p), int(save), cu_seqlens, v.shape[1], rule.l1,
        H=H, **sizes, **_split(_warps(WARPS_FWD, initial_state), sizes),
        VARIANT=rule.variant, PROJECT=rule.project, L1=rule.l1 > 0, CHECKPOINT=CHECKPOINT, BLOCK=BLOCK,
    )  # fmt: skip
    return o, _from_tiles(final, initial_state), kept


@taped
@flat(*BACKWARD)
def lattice_bwd_triton(upstream: Upstream, inputs: Inputs, start: Start, kept: Kept, rule: Rule):
    """Gradients of q, k, v, gamma, log_decay (or None) and the initial state."""
    (do, dfinal), (q, k, v, gamma, log_decay) = upstream, inputs
    (initial_state, cu_seqlens), (kept,) = start, kept
    do, q, k, gamma = (x.contiguous() for x in (do, q, k, gamma))
    if keeps_h(*rule):
        notes = kept.split(kept_sizes(v, initial_state, cu_seqlens, rule))
        return _read_bwd(do, dfinal, q, k, v, gamma, *notes, cu_seqlens)
    v = v.contiguous()
    N, H, _, _ = initial_state.shape
    sizes = _sizes(initial_state, LANES_BWD)
    log_decay = None if log_decay is None else log_decay.contiguous()
    end = _to_tiles(dfinal, sizes)
    dstart, (dq, dk, dv) = torch.empty_like(end), (torch.empty_like(x) for x in (q, k, v))
    shares = [None if x is None else end.new_empty(q.shape) for x in (gamma, log_decay)]
    tile, note = end[0].numel(), sizes["BM"] + sizes["D1"] * sizes["D2"]
    states = end.new_empty(N * H, BLOCK + CHECKPOINT // BLOCK, tile)
    notes = end.new_empty(N * H, CHECKPOINT, note)
    lattice_bwd_kernel[(N * H,)](
        (do, end), (q, k, v, gamma, log_decay), kept, (dq, dk, dv, *shares, dstart), (states, notes), cu_seqlens,
        v.shape[1], rule.l1,
        H=H, **sizes, VARIANT=rule.variant, PROJECT=rule.project, L1=rule.l1 > 0,
        CHECKPOINT=CHECKPOINT, BLOCK=BLOCK, AHEAD=tile <= 4096, num_warps=_warps(WARPS_BWD, initial_state),
    )  # fmt: skip
    gates = (
        None if x is None else x.sum(-1).to(like.dtype) for x, like in zip(shares, (gamma, log_decay), strict=True)
    )
    return dq, dk, dv, *gates, _from_tiles(dstart, initial_state)


def _read_bwd(do, dfinal, q, k, v, gamma, kept, h, p, cu_seqlens):
    """`lattice_bwd_triton` from the tiles, h and p that forward kept; it reads no v."""
    N, H, D, M = dfinal.shape
    sizes = _sizes(dfinal, LANES_BWD)
    split = _split(_warps(WARPS_BWD, dfinal), sizes)
    windows, table = checkpoint_slots(v.shape[0], v.shape[1], cu_seqlens, CHECKPOINT), (None, None)
    if cu_seqlens is not None:
        *table, windows = chunk_table(cu_seqlens, v.shape[1], CHECKPOINT)
    layout = (cu_seqlens, *table, v.shape[1], N)
    end = _to_tiles(dfinal, sizes)
    dstart, BD = torch.empty_like(end), end.shape[2]
    hh, dalpha, dz = (end.new_empty(x.shape) for x in (gamma, q, v))
    dq, dk, dv, dgamma = (x.new_empty(x.shape) for x in (q, k, v, gamma))
    middle, scratch = torch.empty_like(kept), end.new_empty(N * H, CHECKPOINT // 4, end[0].numel())
    a, b, refused = (
        torch.empty_like(dalpha),
        torch.empty_like(dalpha),
        dalpha.new_empty(windows * H, dtype=torch.int32),
    )
    lattice_rule_kernel[(cdiv(hh.numel(), ROWS),)](
        k, gamma, h, p, hh, a, b, hh.numel(), M=M, D=D, BM=sizes["BM"], BD=BD, R=ROWS
    )
    shared = {"H": H, **sizes, "CHECKPOINT": CHECKPOINT}
    window = {name: x for name, x in shared.items() if name not in ("D1", "D2")} | {"BD": BD, "num_warps": 4}
    # rows of 128 bytes at least (kernels/README.md, "Traps")
    by_division = {**window, "MB": 64, "WIDE": max(64, BD), "PRECISION": window_precision(v)}
    by_levels = {
        **window, "MB": 32, "WIDE": max(32, BD), "LEVELS": CHECKPOINT.bit_length() - 1,
        "PRECISION": levels_precision(v),
    }  # fmt: skip

    def read(*operands):
        lattice_slots_kernel[(windows * H,)](*operands, refused, layout, **by_division)
        lattice_slots_levels_kernel[(windows * H,)](*operands, refused, layout, **by_levels)

    moves = k, gamma, h, a, b
    read(do, moves, kept, None, (dq, None, None))
    lattice_middle_kernel[(windows * H,)](
        a, b, h, kept, middle, layout, **shared, GROUP=2, num_warps=split["num_warps"]
    )
    back = (end, do), (q, k, gamma), (h, p, hh, a, b), (kept, middle), (dz, dalpha, dstart), scratch, cu_seqlens
    if can_walk_back(q, k, do, dfinal):
        walk_back(*back)
    else:
        lattice_adjoint_kernel[(N * H,)](
            *back, v.shape[1],
            **shared, WARPS=split["WARPS"], LANES=split["LANES"], num_warps=split["num_warps"],
            GROUP=max(2, split["GROUP"]), FETCH=has_ptx(v),
        )  # fmt: skip
    read(dz, moves, kept, dalpha, (dk, dv, dgamma))
    return dq, dk, dv, dgamma, None, _from_tiles(dstart, dfinal)


@taped
@flat(*STEP)
def lattice_step_triton(inputs: Inputs, pages: Pages, rule: Rule):
    """Update the state [B, H, d, m], or its pages, in place by one token; returns o [B, 1, H, d] in v's dtype."""
    (q, k, v, gamma, log_decay), (state, state_indices) = inputs, pages
    sizes = _sizes(state, LANES_FWD)
    q, k, v, gamma = (x.contiguous() for x in (q, k, v, gamma))
    log_decay = None if log_decay is None else log_decay.contiguous()
    o = torch.empty_like(v)
    heads = v.shape[2]
    lattice_step_kernel[(v.shape[0] * heads,)](
        q, k, v, gamma, log_decay, state, state_indices, *page_strides(state_indices, state), o, rule.l1, heads,
        **sizes, VARIANT=rule.variant, PROJECT=rule.project, L1=rule.l1 > 0, num_warps=_warps(WARPS_FWD, state),
    )  # fmt: skip
    return o
