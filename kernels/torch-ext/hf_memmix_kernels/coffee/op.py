"""The COFFEE op: checks of the arguments, choice of the path, registration with torch.library."""

import functools

import torch
from torch import Tensor

from .._chunks import checkpoint_slots
from .._common import dense, start_state
from .._dispatch import native_library, use_triton
from .._groups import flat, tensors
from .._pages import check_step_states
from .._registration import chunk_op, or_zeros, saves_for_backward, step_op
from .arguments import BACKWARD, FORWARD, STEP, Inputs, Kept, Pages, Rule, Save, Start, Upstream, Wanted
from .native_path import FEEDBACKS, coffee_bwd_native, coffee_fwd_native, coffee_step_native
from .sizes import CHECKPOINT, padded_states
from .torch_path import chunk_length, coffee_bwd_torch, coffee_fwd_torch, coffee_step_torch

MAX_STATES = 64


def _checkpoint_shape(u: Tensor, initial_state: Tensor, cu_seqlens: Tensor | None, save: bool) -> tuple[int, ...]:
    """Shape of what forward keeps for backward, which each backend lays out for itself."""
    B, T, D = u.shape
    n = initial_state.shape[2]
    if use_triton(u, "coffee"):
        return (checkpoint_slots(B, T, cu_seqlens, CHECKPOINT) if save else 0, D, padded_states(n))
    # only the device knows the longest packed sequence: backward runs forward again
    return (-(-T // chunk_length(B * D * n)) if save and cu_seqlens is None else 0, n, B, D)


def _paths(inputs: Inputs, start: Start, rule: Rule, *upstream: Tensor):
    """The scan and its backward on the path that runs these tensors."""
    native = rule.cu_seqlens is None and start.initial_state.dtype == torch.float32
    if native and (library := native_library("coffee", *inputs, *start, *upstream)):
        return functools.partial(coffee_fwd_native, library), functools.partial(coffee_bwd_native, library)
    if use_triton(inputs.u, "coffee"):
        from .launch import coffee_bwd_triton, coffee_fwd_triton

        return coffee_fwd_triton, coffee_bwd_triton
    return coffee_fwd_torch, coffee_bwd_torch


@chunk_op("hf_memmix::coffee_fwd")
@flat(*FORWARD)
def _fwd(inputs: Inputs, start: Start, rule: Rule, save: Save) -> tuple[Tensor, Tensor, Tensor]:
    fwd, _ = _paths(inputs, start, rule)
    save = save.save and (rule.cu_seqlens is None or use_triton(inputs.u, "coffee"))
    return fwd(*inputs, *start, *rule, save)


@_fwd.register_fake
@flat(*FORWARD)
def _(inputs, start, rule, save):
    u, state = inputs.u, start.initial_state
    kept = _checkpoint_shape(u, state, rule.cu_seqlens, save.save)
    return u.new_empty(u.shape), state.new_empty(state.shape), state.new_empty(kept)


@chunk_op("hf_memmix::coffee_bwd")
@flat(*BACKWARD)
def _bwd(upstream: Upstream, inputs: Inputs, start: Start, kept: Kept, rule: Rule, wanted: Wanted) -> tensors(7):
    (u, lam, w, C, w_filter, gate), (checkpoints,) = inputs, kept
    fwd, bwd = _paths(inputs, start, rule, *upstream)
    if not checkpoints.numel():
        checkpoints = fwd(*inputs, *start, *rule, True)[2]
    grads = bwd(*upstream, *inputs, *start, checkpoints, *rule, *wanted)
    du, dlam, dw, dC, dfilter, dgate, dinitial = grads
    if gate is None or not wanted.gate_grad:
        dgate = u.new_empty(0)
    else:
        dgate = (dgate.sum(-1) if gate.dim() == 2 else dgate).to(gate.dtype).contiguous()
    if w_filter is None:
        dfilter = u.new_empty(0)
    # those of the parameters are parts of one tensor, which results of a custom op may not be
    pairs = ((dlam, lam), (dw, w), (dC, C), (dfilter, C if w_filter is None else w_filter))
    grads = (t.to(like.dtype, memory_format=torch.contiguous_format, copy=True) for t, like in pairs)
    return du.to(u.dtype).contiguous(), *grads, dgate, dinitial


@_bwd.register_fake
@flat(*BACKWARD)
def _(upstream, inputs, start, kept, rule, wanted):
    *likes, w_filter, gate = inputs
    likes.append(inputs.C.new_empty(0) if w_filter is None else w_filter)
    likes.append(inputs.u.new_empty(0) if gate is None or not wanted.gate_grad else gate)
    return tuple(t.new_empty(t.shape) for t in (*likes, *start))


def _setup_context(ctx, inputs, output):
    *tensors, ctx.feedback, _ = inputs
    ctx.save_for_backward(*tensors, output[2])
    ctx.mark_non_differentiable(output[2])
    ctx.set_materialize_grads(False)


def _backward(ctx, dy, dfinal, _):
    *inputs, cu_seqlens, checkpoints = ctx.saved_tensors
    gate_grad = ctx.needs_input_grad[5]
    dy, dfinal = or_zeros(dy, inputs[0]), or_zeros(dfinal, inputs[6])
    grads = _bwd(dy, dfinal, *inputs, checkpoints, cu_seqlens, ctx.feedback, gate_grad)
    du, dlam, dw, dC, dfilter, dgate, dinitial = grads
    dfilter = None if inputs[4] is None else dfilter
    return du, dlam, dw, dC, dfilter, dgate if gate_grad else None, dinitial, *[None] * 3


_fwd.register_autograd(_backward, setup_context=_setup_context)


@step_op("hf_memmix::coffee_step", mutates_args=("state",))
@flat(*STEP)
def _step(inputs: Inputs, pages: Pages) -> Tensor:
    native = inputs.gate is None and pages.state.dtype == torch.float32
    if native and (library := native_library("coffee", *inputs[:5], pages.state)):
        return coffee_step_native(library, inputs, pages)
    step = coffee_step_torch
    if use_triton(inputs.u, "coffee"):
        from .launch import coffee_step_triton as step
    return step(*inputs, *pages)


@_step.register_fake
def _(u, *rest):
    return u.new_empty(u.shape)


def _check(op: str, inputs: Inputs, feedback: str) -> Inputs:
    """Raise ValueError for shapes and options that do not fit; returns the inputs, with zeros for an unused w."""
    u, lam, w, C, w_filter, gate = inputs
    if u.dim() != 3:
        raise ValueError(f"{op}: u must be [B, T, D], got shape {tuple(u.shape)}")
    if u.shape[1] == 0:
        raise ValueError(f"{op}: the sequence is empty (T = 0); pass at least one token")
    if lam.dim() != 2 or lam.shape[0] != u.shape[2] or not 1 <= lam.shape[1] <= MAX_STATES:
        raise ValueError(
            f"{op}: lam must be [D={u.shape[2]}, n] with 1 <= n <= {MAX_STATES} states, got {tuple(lam.shape)}"
        )
    if feedback not in FEEDBACKS:
        raise ValueError(f"{op}: feedback={feedback!r} is not one of {FEEDBACKS}")
    if feedback == "token":
        if w is not None or gate is None:
            raise ValueError(f"{op}: with feedback='token' (equation 4) the gate is an input: pass gate, and w=None")
        w = torch.zeros_like(lam)
    for name, p in (("w", w), ("C", C), ("w_filter", w_filter)):
        if name == "w_filter" and p is None:
            continue
        if p is None or p.shape != lam.shape:
            got = None if p is None else tuple(p.shape)
            raise ValueError(f"{op}: {name} must be [D, n] = {tuple(lam.shape)} like lam, got {got}")
    if gate is not None and gate.shape not in (u.shape[:2], u.shape):
        raise ValueError(
            f"{op}: gate must be [B, T] = {tuple(u.shape[:2])} or [B, T, D] = {tuple(u.shape)}, got"
            f" {tuple(gate.shape)}"
        )
    return inputs._replace(w=w)


def check_coffee(lam: Tensor | None = None, state: Tensor | None = None) -> None:
    """Check values, which the op does not do because it would wait for the device. Call it on loaded data.

    Raises:
        ValueError: lam outside [-2, 0], where 1 + lam leaves the unit circle and states grow without bound, or a
            state that is not finite.
    """
    if lam is not None and not ((lam >= -2) & (lam <= 0)).all():
        low, high = lam.min().item(), lam.max().item()
        raise ValueError(
            f"coffee: lambda lies in [{low:.4g}, {high:.4g}], it must be in [-2, 0]: outside of it states grow without"
            " bound; clamp it, `lam.clamp_(-2, 0)`, after every optimizer step"
        )
    if state is not None and not torch.isfinite(state).all():
        bad = int((~torch.isfinite(state)).sum())
        raise ValueError(
            f"coffee: the state holds {bad} values that are not finite; start from zeros (initial_state=None) or load"
            " a state saved before it diverged"
        )


def chunk_coffee(
    u: Tensor,
    lam: Tensor,
    w: Tensor | None,
    C: Tensor,
    w_filter: Tensor | None = None,
    *,
    gate: Tensor | None = None,
    feedback: str = "sigmoid",
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """COFFEE: s_k = gate_k phi_k, x_k = (1 + lam s_k) x_{k-1} + s_k u_k, y_k = sum_j C_j x_{k,j} (equations 5, 7).

    A padded token has gate = 0: it does not change the state. The step bias B of equations 4 and 6 is not an argument:
    if the gate does not depend on the state, C * B in place of C gives the same result as B in front of u.

    Args:
        u: [B, T, D], one input per feature.
        lam: [D, n] in [-2, 0] (not checked here, see `check_coffee`), 1 <= n <= 64 states per feature.
        w: [D, n], the feedback; None for "token".
        C: [D, n].
        w_filter: [D, n] of the output filter y_k <- sigmoid(w_filter . x_k) y_k (Remark 2), or None.
        gate: [B, T] or [B, T, D], a factor of the gate; 1 when None.
        feedback: phi. "sigmoid" is sigmoid(w x_{k-1}). From the paper's ablation: "linear" is w x_{k-1}; "input" is
            sigmoid(w u_k), without feedback; "token" is 1 (equation 4), then `gate` is the whole gate.
        initial_state: [N, D, n]; zeros when None.
        cu_seqlens: boundaries [N + 1] of packed sequences; B must be 1. N = B without it.

    Returns:
        y [B, T, D] in u.dtype and the final state [N, D, n] in float32 (float64 for float64 inputs), both
        differentiable in every tensor.

    Raises:
        ValueError: a shape or option is none of these.
    """
    inputs = _check("chunk_coffee", Inputs(u, lam, w, C, w_filter, gate), feedback)
    state = start_state("chunk_coffee", u, cu_seqlens, lam.shape, initial_state)
    save = saves_for_backward(*inputs, state)
    y, final, _ = _fwd(*inputs, state, dense(cu_seqlens), feedback, save)
    return y, final


def coffee_step(
    u: Tensor,
    lam: Tensor,
    w: Tensor | None,
    C: Tensor,
    w_filter: Tensor | None = None,
    *,
    state: Tensor,
    gate: Tensor | None = None,
    feedback: str = "sigmoid",
    state_indices: Tensor | None = None,
) -> Tensor:
    """One token of `chunk_coffee`, without autograd.

    Args:
        u: [B, 1, D]; lam, w, C, w_filter, gate, feedback: as in `chunk_coffee`.
        state: contiguous [B, D, n], updated IN PLACE; with `state_indices` pages [pages, D, n].
        state_indices: int32 or int64 [B], the page of each row; see kernels/README.md.

    Returns:
        y [B, 1, D] in u.dtype.

    Raises:
        ValueError: more than one token, shapes that do not fit, or a state that is not contiguous.
    """
    inputs = _check("coffee_step", Inputs(u, lam, w, C, w_filter, gate), feedback)
    check_step_states("coffee_step", u.shape[1], (state,), ((u.shape[0], *lam.shape),), state_indices)
    return _step(*inputs, state, state_indices, feedback)
