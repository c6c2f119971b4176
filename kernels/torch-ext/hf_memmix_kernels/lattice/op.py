"""The Lattice op: checks of the arguments, choice of the path, registration with torch.library."""

import torch
from torch import Tensor

from .._common import check_cu_seqlens, compute_dtype, dense, exact, num_sequences
from .._dispatch import native_library, use_triton
from .._groups import flat, tensors
from .._pages import check_step_states
from .._registration import chunk_op, or_zeros, saves_for_backward, step_op
from .arguments import BACKWARD, FORWARD, STEP, Inputs, Kept, Pages, Rule, Save, Start, Upstream
from .naive import BASELINES, VARIANTS
from .native_path import lattice_bwd_native, lattice_fwd_native, lattice_step_native, runs_native
from .sizes import CHECKPOINT, MAX_DIM, STRONGEST_DECAY, dual_sizes, kept_sizes, runs_dual
from .torch_path import lattice_bwd_torch, lattice_fwd_torch, lattice_step_torch


def _path(x: Tensor, dual: bool = False):
    """The functions for forward, backward and step on the path that runs `x`. Only Triton has the dual form."""
    if not use_triton(x, "lattice"):
        return lattice_fwd_torch, lattice_bwd_torch, lattice_step_torch
    from .launch import lattice_bwd_triton, lattice_fwd_triton, lattice_step_triton

    if dual:
        from .launch_dual import dual_bwd_triton, dual_fwd_triton

        return dual_fwd_triton, dual_bwd_triton, lattice_step_triton

    return lattice_fwd_triton, lattice_bwd_triton, lattice_step_triton


def _native(inputs: Inputs, rule: Rule, *tensors: Tensor):
    """The native code, if it should run this rule on these tensors, the state last; else None."""
    if tensors[-1].dtype != torch.float32 or not runs_native(inputs.log_decay, *rule):
        return None
    return native_library("lattice", inputs.v, *inputs, *tensors)


def _kept_shape(v: Tensor, start: Start, rule: Rule, save: bool) -> tuple[int, ...]:
    """Shape of the buffer that forward keeps for backward. Each path has its own layout."""
    (N, H, d, m), cu_seqlens = start.initial_state.shape, start.cu_seqlens
    if use_triton(v, "lattice"):
        size = sum(dual_sizes(v, *start) if runs_dual(*rule) else kept_sizes(v, *start, rule))
        return (size if save else 0,)
    # the longest packed sequence is not known without a device read, so backward runs forward again
    return (-(-v.shape[1] // CHECKPOINT) if save and cu_seqlens is None else 0, N * H, m, d)


@chunk_op("hf_memmix::lattice_fwd")
@flat(*FORWARD)
def _fwd(inputs: Inputs, start: Start, rule: Rule, save: Save) -> tuple[Tensor, Tensor, Tensor]:
    saves = save.save and (use_triton(inputs.v, "lattice") or start.cu_seqlens is None)
    if library := _native(inputs, rule, start.initial_state):
        return lattice_fwd_native(library, inputs, start, rule.variant, saves)
    outputs = _path(inputs.v, runs_dual(*rule))[0](*inputs, *start, *rule, saves)
    return tuple(t.contiguous() for t in outputs)


@_fwd.register_fake
@flat(*FORWARD)
def _(inputs, start, rule, save):
    v, state = inputs.v, start.initial_state
    return v.new_empty(v.shape), state.new_empty(state.shape), state.new_empty(_kept_shape(v, start, rule, save.save))


@chunk_op("hf_memmix::lattice_bwd")
@flat(*BACKWARD)
def _bwd(upstream: Upstream, inputs: Inputs, start: Start, kept: Kept, rule: Rule) -> tensors(6):
    v, notes = inputs.v, kept.kept
    if library := _native(inputs, rule, *upstream, start.initial_state):
        if not notes.numel():
            notes = lattice_fwd_native(library, inputs, start, rule.variant, True)[2]
        grads = lattice_bwd_native(library, upstream, inputs, notes, start.cu_seqlens, rule.variant)
        return *grads[:4], v.new_empty(0), grads[4]
    forward, backward, _ = _path(v, runs_dual(*rule))
    if not notes.numel():
        notes = forward(*inputs, *start, *rule, True)[2]
    *grads, dinitial = backward(*upstream, *inputs, *start, notes, *rule)
    grads = (v.new_empty(0) if x is None else x.contiguous() for x in grads)
    return *grads, dinitial.contiguous()


@_bwd.register_fake
@flat(*BACKWARD)
def _(upstream, inputs, start, *rest):
    grads = [inputs.v.new_empty(0) if x is None else x.new_empty(x.shape) for x in inputs]
    return *grads, start.initial_state.new_empty(start.initial_state.shape)


def _setup_context(ctx, inputs, output):
    tensors, ctx.rule = inputs[:7], inputs[7:10]
    ctx.save_for_backward(*tensors, output[2])
    ctx.mark_non_differentiable(output[2])
    ctx.set_materialize_grads(False)


def _backward(ctx, do, dfinal, _):
    inputs = ctx.saved_tensors
    do, dfinal = or_zeros(do, inputs[2]), or_zeros(dfinal, inputs[5])
    dq, dk, dv, dgamma, dlog, dinitial = _bwd(do, dfinal, *inputs, *ctx.rule)
    return dq, dk, dv, dgamma, None if inputs[4] is None else dlog, dinitial, *[None] * 5


_fwd.register_autograd(_backward, setup_context=_setup_context)


@step_op("hf_memmix::lattice_step", mutates_args=("state",))
@flat(*STEP)
def _step(inputs: Inputs, pages: Pages, rule: Rule) -> Tensor:
    if library := _native(inputs, rule, pages.state):
        return lattice_step_native(library, inputs, pages, rule.variant)
    return _path(inputs.v)[2](*inputs, *pages, *rule)


@_step.register_fake
def _(q, k, v, *rest):
    return v.new_empty(v.shape)


def _check(inputs: Inputs, rule: Rule, state: Tensor | None = None, cu_seqlens: Tensor | None = None) -> None:
    """Raise ValueError unless the arguments fit together. Only `check_lattice` checks values."""
    (q, k, v, gamma, log_decay), (variant, project, l1) = inputs, rule
    if q.dim() != 4 or v.dim() != 4 or k.shape != q.shape or v.shape[:3] != q.shape[:3]:
        raise ValueError(
            "lattice needs q and k [B, T, H, m], v [B, T, H, d], got"
            f" {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
        )
    B, T, H, m = q.shape
    d = v.shape[-1]
    if m > d:
        raise ValueError(f"lattice: {m} slots of size {d} cannot be orthonormal; take m <= d slots")
    if d > MAX_DIM:
        raise ValueError(f"lattice: slots of size {d} are over the limit of {MAX_DIM}; use more, smaller heads")
    if T == 0:
        raise ValueError("lattice: the sequence is empty (T = 0); pass at least one token")
    for name, gate in (("gamma", gamma), ("log_decay", log_decay)):
        if gate is not None and gate.shape != q.shape[:3]:
            raise ValueError(f"lattice: {name} must be [B, T, H] = {(B, T, H)}, got {tuple(gate.shape)}")
    if variant not in VARIANTS:
        raise ValueError(f"lattice: variant={variant!r} is not one of {VARIANTS}")
    if variant in BASELINES and project:
        raise ValueError(f"lattice: the baseline variant={variant!r} has no unit slots; pass project=False")
    if not l1 >= 0:
        raise ValueError(f"lattice: l1={l1} must be >= 0; 0 is no shrinkage")
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, B)
    sizes = (num_sequences(B, cu_seqlens), H, d, m)
    if state is not None and state.shape != sizes:
        raise ValueError(f"lattice: the state must be [N, H, d, m] = {sizes}, got {tuple(state.shape)}")


def check_lattice(
    gamma: Tensor | None = None, state: Tensor | None = None, tolerance: float = 1e-3, **tensors: Tensor
) -> None:
    """Check values, which the ops do not do because it would wait for the device. Call it on loaded data.

    Args:
        gamma: step sizes, any shape; 0 only at padding.
        state: [..., d, m], e.g. loaded from disk; None skips it.
        tolerance: largest allowed difference between a slot's norm and 1.
        tensors: more tensors that must be finite, by name.

    Raises:
        ValueError: a value that is not finite, gamma < 0, or a state whose columns are not of unit norm.
    """
    for name, x in {"gamma": gamma, "state": state, **tensors}.items():
        if x is not None and not torch.isfinite(x).all():
            raise ValueError(f"lattice: {name} holds {int((~torch.isfinite(x)).sum())} values that are not finite")
    if gamma is not None and (gamma < 0).any():
        raise ValueError(f"lattice: gamma={gamma.min().item():.3g} is negative; step sizes are > 0, 0 at padding only")
    if state is not None:
        norms = torch.linalg.vector_norm(exact(state), dim=-2)
        worst = norms.flatten()[(norms - 1).abs().argmax()].item()
        if abs(worst - 1) > tolerance:
            raise ValueError(
                f"lattice: a slot (column of the state) has norm {worst:.6g}, not 1 +- {tolerance}; normalise the"
                " columns, or pass project=False if the state comes from a model without projection"
            )


def _fold(gamma: Tensor, log_decay: Tensor) -> tuple[Tensor, None]:
    """P_C(mu s + Delta) = P_C(s + Delta / mu), so with projection a forget gate is the same as a larger step."""
    dtype = torch.promote_types(gamma.dtype, torch.float32)
    return gamma.to(dtype) * (-log_decay.to(dtype).clamp_min(STRONGEST_DECAY)).exp(), None


def chunk_lattice(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gamma: Tensor,
    log_decay: Tensor | None = None,
    *,
    variant: str = "dec",
    project: bool = True,
    l1: float = 0.0,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Orthogonal state recurrence (Lattice, eq. 13 and 14), exact for every variant.

    m slots s_i of unit norm, the columns of S, are written with what a token adds to them, and read by q:

        s_i <- P_C(mu s_i - gamma c_i P(s_i) h),   y = S q,   P(s) = I - s s^T,   P_C(s) = s / |s|

    Args:
        q, k: [B, T, H, m], m <= d <= 128.
        v: [B, T, H, d].
        gamma: step sizes >= 0 [B, T, H], best in float32. A token at gamma = 0 (and log_decay = 0) is padding: it
            leaves the state as it is.
        log_decay: log of the forget gate mu (eq. 16) <= 0 [B, T, H]; None is mu = 1. With `project` it is the same as
            a step gamma / mu; values below -20 act as -20.
        variant: "dec": h = S k - v, c = k (eq. 7); "enc": h = v, c = S^T v - k (eq. 10); "sim": h = -v, c = k
            (eq. 12). "enc" is a least mean squares step: it needs gamma |v|^2 < 2, or errors grow. Baselines, which
            need project=False: "ttt", the output normalised instead of the slots (eq. 19), and "delta", the delta
            rule (eq. 20).
        project: whether slots stay on the unit sphere (eq. 14). False is eq. 13 alone: gradients are taken at the
            normalised slots and divided by their norms, which grow.
        l1: weight lambda of the L1 penalty: slots are shrunk by gamma * lambda after every update (eq. 18), before the
            projection. A slot that would vanish is not shrunk.
        initial_state: S_0 [N, H, d, m]; with `project` its columns are normalised first. None is the first m unit
            vectors.
        cu_seqlens: boundaries [N + 1] of packed sequences; B is 1 then. Without it N = B.

    Returns:
        y [B, T, H, d] in v's dtype and the final state [N, H, d, m], float32 (float64 for float64 inputs).
        Differentiable in every tensor and through both results.

    Raises:
        ValueError: shapes or options do not fit. Values are not checked, see `check_lattice`.
    """
    rule = Rule(variant, project, float(l1))
    _check(Inputs(q, k, v, gamma, log_decay), rule, initial_state, cu_seqlens)
    dtype = compute_dtype(v.dtype)
    N, H, d, m = num_sequences(q.shape[0], cu_seqlens), q.shape[2], v.shape[-1], q.shape[-1]
    if initial_state is None:
        state = torch.eye(d, m, dtype=dtype, device=v.device).repeat(N, H, 1, 1)
    else:
        state = initial_state.to(dtype)
        if project:
            state = state / torch.linalg.vector_norm(state, dim=-2, keepdim=True)
    if project and log_decay is not None:
        gamma, log_decay = _fold(gamma, log_decay)
    save = saves_for_backward(q, k, v, gamma, log_decay, state)
    o, final, _ = _fwd(q, k, v, gamma, log_decay, state, dense(cu_seqlens), *rule, save)
    return o, final


def lattice_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gamma: Tensor,
    log_decay: Tensor | None = None,
    *,
    state: Tensor,
    variant: str = "dec",
    project: bool = True,
    l1: float = 0.0,
    state_indices: Tensor | None = None,
) -> Tensor:
    """One decoding step of `chunk_lattice`, without autograd.

    Args:
        q, k, v, gamma, log_decay: one token, as in `chunk_lattice`.
        state: contiguous [B, H, d, m], float32 or float64, updated IN PLACE; with `state_indices` pages
            [pages, H, d, m]. With `project` its columns have unit norm.
        state_indices: int32 or int64 [B], the page of each row; see kernels/README.md.

    Returns:
        y [B, 1, H, d] in v's dtype.

    Raises:
        ValueError: more than one token, shapes that do not fit, or a state that is not contiguous.
    """
    rule = Rule(variant, project, float(l1))
    _check(Inputs(q, k, v, gamma, log_decay), rule)
    (B, T, H, m), d = q.shape, v.shape[-1]
    check_step_states("lattice_step", T, (state,), ((B, H, d, m),), state_indices)
    if project and log_decay is not None:
        gamma, log_decay = _fold(gamma, log_decay)
    return _step(q, k, v, gamma, log_decay, state, state_indices, *rule)
