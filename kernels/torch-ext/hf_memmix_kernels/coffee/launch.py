"""Launches of the COFFEE kernels: how lanes are laid over threads, and where the checkpoints lie in memory."""

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from .._chunks import checkpoint_slots
from .._common import num_sequences
from .._device import has_ptx
from .._groups import flat
from .._launch import accumulator, cdiv, contiguous, page_strides
from .._tape import taped
from .arguments import BACKWARD, FORWARD, STEP, Inputs, Kept, Pages, Rule, Save, Start, Upstream, Wanted
from .kernels.affine_scan import affine_scan_kernel
from .kernels.backward import coffee_bwd_kernel
from .kernels.forward import coffee_fwd_kernel
from .kernels.step import coffee_step_kernel
from .kernels.tiles import FORMS, PORTABLE, REFINED
from .sizes import CHECKPOINT, GROUP, padded_states

# from this number of lanes on, a thread holds four states; with fewer lanes special function units would be idle
MANY_LANES = 50_000
# up to this number of lanes, backward runs segments of the sequence in parallel; tokens per segment
FEW_LANES = 16_384
SEGMENT = 512


class LaunchOptions(NamedTuple):
    """Launch options of one kernel.

    Attributes:
        per_thread: states of a feature per thread.
        warps: warps per program.
        group: tokens loaded together (and in backward kept in registers).
        chain: whether the argument of a gate is computed without waiting for the state.
        segment: tokens per segment, where backward runs segments in parallel; 0 for the whole sequence at once.
    """

    per_thread: int
    warps: int
    group: int
    chain: bool = False
    segment: int = 0


def _per_thread(n: int, wanted: int) -> int:
    """At most `wanted` states per thread, but enough that one warp holds a whole feature."""
    return max(min(wanted, n), n // 32)


@functools.lru_cache(maxsize=256)
def forward_options(sequences: int, features: int, n: int, refined: bool) -> LaunchOptions:
    NP = padded_states(n)
    if sequences * features * NP >= MANY_LANES:
        per_thread = _per_thread(NP, 4)
        return LaunchOptions(per_thread, 4, 8)
    per_thread = _per_thread(NP, 1)
    return LaunchOptions(per_thread, 1, 16, chain=not refined)


@functools.lru_cache(maxsize=256)
def backward_options(
    sequences: int, tokens: int, features: int, n: int, packed: bool, filtered: bool
) -> LaunchOptions:
    NP = padded_states(n)
    lanes = sequences * features * NP
    many = lanes >= MANY_LANES
    # four states per thread and the gradients of the filter would take all registers, and twice as long to compile
    per_thread = _per_thread(NP, (2 if filtered else 4) if many else 1)
    segment = SEGMENT if lanes <= FEW_LANES and tokens > 2 * SEGMENT and not packed else 0
    return LaunchOptions(per_thread, 4 if many else 1, GROUP, segment=segment)


def _math(x: Tensor) -> int:
    """MATH of kernels/tiles.py. The interpreter, float64, which runs only there, and AMD have no such instructions."""
    instructions = has_ptx(x) and x.dtype != torch.float64
    return instructions + (REFINED.value if x.dtype == torch.float32 else PORTABLE)


def _gate_strides(gate: Tensor | None, features: int) -> tuple[int, int]:
    if gate is None:
        return 0, 0
    return (1, 0) if gate.dim() == 2 else (features, 1)


@taped
@flat(*FORWARD)
def coffee_fwd_triton(inputs: Inputs, start: Start, rule: Rule, save: Save) -> tuple[Tensor, ...]:
    """Returns y [B, T, D], the final states [N, D, n] and the checkpoints backward needs (empty unless `save`)."""
    (save,), (cu_seqlens, feedback) = save, rule
    u, lam, w, C, w_filter, gate, x0 = contiguous(*inputs, *start)
    (B, T, D), n = u.shape, lam.shape[1]
    N, NP = num_sequences(B, cu_seqlens), padded_states(n)
    chosen = forward_options(N, D, n, _math(u) >= REFINED.value)
    y, final = torch.empty_like(u), torch.empty_like(x0)
    slots = checkpoint_slots(B, T, cu_seqlens, CHECKPOINT) if save else 0
    checkpoints = x0.new_empty(slots, D, NP)
    S, L = NP // chosen.per_thread, max(32 * chosen.warps, NP // chosen.per_thread)
    grid = (N * cdiv(D * S, L),)
    coffee_fwd_kernel[grid](
        (u, lam, w, C, w_filter, gate), x0, (y, final, checkpoints), cu_seqlens, T, *_gate_strides(gate, D),
        D=D, N=n, NP=NP, S=S, NS=chosen.per_thread, L=L, P=chosen.group, CK=CHECKPOINT, FORM=FORMS[feedback],
        FILTER=w_filter is not None, GATE=gate is not None, PACKED=cu_seqlens is not None, SAVE=save,
        CHAIN=chosen.chain and gate is None and feedback == "sigmoid", MATH=_math(u),
        ACC=accumulator(u.dtype), num_warps=chosen.warps,
    )  # fmt: skip
    return y, final, checkpoints


def affine_scan(A: Tensor, b: Tensor, start: Tensor) -> Tensor:
    """What enters every segment from its end, h' = A h + b from h = start [N, lanes]; A and b [N, segments, lanes]."""
    N, segments, lanes = A.shape
    out = torch.empty_like(A)
    L = 32
    affine_scan_kernel[(N * cdiv(lanes, L),)](
        A, b, start.contiguous(), out, segments, lanes, L=L, P=16, ACC=accumulator(A.dtype), num_warps=1
    )
    return out


def _pad_states(x: Tensor) -> Tensor:
    """[N, D, n] -> [N, D * NP], the lanes of a checkpoint."""
    return torch.nn.functional.pad(x, (0, padded_states(x.shape[-1]) - x.shape[-1])).flatten(1)


@taped
@flat(*BACKWARD)
def coffee_bwd_triton(
    upstream: Upstream, inputs: Inputs, start: Start, kept: Kept, rule: Rule, wanted: Wanted
) -> tuple[Tensor, ...]:
    """du, dlam, dw, dC, dw_filter (empty without a filter), dgate [B, T, D] (empty unless `gate_grad`), dinitial."""
    (dy, dfinal), (cu_seqlens, feedback), (gate_grad,) = upstream, rule, wanted
    dy, dfinal, u, lam, w, C, w_filter, gate = contiguous(*upstream, *inputs)
    (B, T, D), n = u.shape, lam.shape[1]
    N, NP = num_sequences(B, cu_seqlens), padded_states(n)
    chosen = backward_options(N, T, D, n, cu_seqlens is not None, w_filter is not None)
    P, R = chosen.group, CHECKPOINT // chosen.group
    segment = chosen.segment // CHECKPOINT * R
    segments = cdiv(cdiv(T, P), segment) if segment else 1
    S, L = NP // chosen.per_thread, max(32 * chosen.warps, NP // chosen.per_thread)
    du, dx0 = torch.empty_like(u), torch.empty_like(start.initial_state, memory_format=torch.contiguous_format)
    dgate = u.new_empty((B, T, D) if gate_grad else (0,), dtype=dx0.dtype)
    dparams = dx0.new_empty(N * segments, 4, D, n)
    options = {
        "D": D, "N": n, "NP": NP, "S": S, "NS": chosen.per_thread, "L": L, "P": P, "R": R, "FORM": FORMS[feedback],
        "FILTER": w_filter is not None, "GATE": gate is not None, "PACKED": cu_seqlens is not None,
        "MATH": _math(u), "ACC": accumulator(u.dtype), "num_warps": chosen.warps,
    }  # fmt: skip
    grid = (N * segments * cdiv(D * S, L),)
    upstream, inputs = (dy, dfinal), (u, lam, w, C, w_filter, gate)
    grads = du, dgate, dparams, dx0
    strides, carries, A = _gate_strides(gate, D), None, None
    if segments > 1:
        A, b = (dx0.new_empty(N, segments, D * NP) for _ in range(2))
        coffee_bwd_kernel[grid](
            upstream, inputs, *kept, grads, (A, b), cu_seqlens, T, *strides, segment, segments,
            DGATE=False, PARALLEL=False, SUMMARY=True, **options,
        )  # fmt: skip
        carries = affine_scan(A, b, _pad_states(dfinal))
    coffee_bwd_kernel[grid](
        upstream, inputs, *kept, grads, (A, carries), cu_seqlens, T, *strides, segment or T, segments,
        DGATE=gate_grad, PARALLEL=segments > 1, SUMMARY=False, **options,
    )  # fmt: skip
    dlam, dw, dC = dparams[:, :3].sum(0)
    dfilter = dC.new_empty(0) if w_filter is None else dparams[:, 3].sum(0)
    return du, dlam, dw, dC, dfilter, dgate, dx0


@taped
@flat(*STEP)
def coffee_step_triton(inputs: Inputs, pages: Pages) -> Tensor:
    """One token [B, 1, D]; advances the contiguous `state` [B, D, n], or its pages, in place, in one launch."""
    state, state_indices, feedback = pages
    u, lam, w, C, w_filter, gate = contiguous(*inputs)
    (B, _, D), n = u.shape, lam.shape[1]
    NP = padded_states(n)
    NS = _per_thread(NP, 1)
    S, L = NP // NS, 128
    y = torch.empty_like(u)
    coffee_step_kernel[(B * cdiv(D * S, L),)](
        u, lam, w, C, w_filter, gate, state, state_indices, *page_strides(state_indices, state), y,
        *_gate_strides(gate, D),
        D=D, N=n, S=S, NS=NS, L=L, FORM=FORMS[feedback], FILTER=w_filter is not None, GATE=gate is not None,
        MATH=_math(u), ACC=accumulator(u.dtype), num_warps=4,
    )  # fmt: skip
    return y
