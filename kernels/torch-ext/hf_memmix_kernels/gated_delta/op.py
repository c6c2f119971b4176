"""The op of the gated delta rule: checks of the arguments, choice of the path, registration with torch.library."""

from torch import Tensor

from .. import _native_memory
from .._common import check_shared_heads, dense, start_state
from .._dispatch import use_triton
from .._groups import flat, tensors
from .._pages import check_step_states
from .._registration import chunk_op, module, or_zeros, step_op
from .arguments import Inputs, Token, Upstream
from .torch_path import gated_delta_bwd_torch, gated_delta_fwd_torch, gated_delta_step_torch


def _runs_triton(a: Inputs | Token) -> bool:
    return use_triton(a.q, "gated_delta", max(a.q.shape[-1], a.v.shape[-1]))


@chunk_op("hf_memmix::gated_delta_fwd")
@flat(Inputs)
def _fwd(a: Inputs) -> tuple[Tensor, Tensor]:
    if library := _native_memory.library_for("gated_delta", a.initial_state, *a[:6]):
        return _native_memory.forward(library, "gated_delta", a)
    fwd = module(".launch", __package__).gated_delta_fwd_triton if _runs_triton(a) else gated_delta_fwd_torch
    return fwd(*a)


@_fwd.register_fake
@flat(Inputs)
def _(a):
    return a.q.new_empty(*a.beta.shape, a.v.shape[-1]), a.initial_state.new_empty(a.initial_state.shape)


@chunk_op("hf_memmix::gated_delta_bwd")
@flat(Upstream, Inputs)
def _bwd(upstream: Upstream, a: Inputs) -> tensors(6):
    if library := _native_memory.library_for("gated_delta", a.initial_state, *a[:6], *upstream):
        dq, dk, dv, dg, dbeta, _, dinitial = _native_memory.backward(library, "gated_delta", upstream, a)
        return dq, dk, dv, dg, dbeta, dinitial
    bwd = module(".launch", __package__).gated_delta_bwd_triton if _runs_triton(a) else gated_delta_bwd_torch
    return bwd(*upstream, *a)


@_bwd.register_fake
@flat(Upstream, Inputs)
def _(upstream, a):
    return tuple(t.new_empty(t.shape) for t in a[:6])


def _setup_context(ctx, inputs, output):
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors)
    ctx.set_materialize_grads(False)


def _backward(ctx, do, dfinal):
    a = Inputs(*ctx.saved_tensors, ctx.scale)
    do, dfinal = or_zeros(do, a.q, (*a.beta.shape, a.v.shape[-1])), or_zeros(dfinal, a.initial_state)
    return *_bwd(do, dfinal, *a), None, None


_fwd.register_autograd(_backward, setup_context=_setup_context)


@step_op("hf_memmix::gated_delta_step", mutates_args=("state",))
@flat(Token)
def _step(token: Token) -> Tensor:
    if library := _native_memory.library_for("gated_delta", token.state, *token[:6]):
        return _native_memory.step(library, "gated_delta", token)
    if _runs_triton(token):
        from .launch import gated_delta_step_triton as step
    else:
        step = gated_delta_step_torch
    return step(*token)


@_step.register_fake
def _(q, k, v, log_decay, beta, *rest):
    return q.new_empty(*beta.shape, v.shape[-1])


def _check(op: str, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor):
    """Raise ValueError unless the shapes fit together, see `chunk_gated_delta`."""
    heads = check_shared_heads(op, q, k, v)
    if log_decay.shape not in (heads, (*heads, q.shape[3])):
        raise ValueError(
            f"{op}: log_decay must be [B, T, H] = {tuple(heads)} or [B, T, H, K] = {(*heads, q.shape[3])}, got"
            f" {tuple(log_decay.shape)}"
        )
    if beta.shape != heads:
        raise ValueError(f"{op}: beta must be [B, T, H] = {tuple(heads)}, got {tuple(beta.shape)}")


def chunk_gated_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The gated delta rule (arXiv:2412.06464), and Kimi Delta Attention (arXiv:2510.26692), in chunks of 64 tokens.

        S_t = (I - beta_t k_t k_t^T) Diag(e^g_t) S_{t-1} + beta_t k_t v_t^T,  o_t = scale * S_t^T q_t

    The H heads either have queries of their own and share keys and values in groups (Hq = H, Hv = Hk), as in
    attention, or they have values of their own and share queries and keys (Hq = Hk, Hv = H), as in Qwen3-Next. Head h
    reads head h // (H / Hq) of q, and so on. A padded token has log_decay = 0 and beta = 0, so it leaves the state as
    it is.

    The recurrence is stable for 0 <= beta |k|^2 <= 2: give k the norm 1. Larger keys are not refused, and let the
    state grow from token to token.

    Args:
        q: [B, T, Hq, K], K <= 256.
        k, v: [B, T, Hk, K], [B, T, Hv, V], V <= 256.
        log_decay: g <= 0, natural logarithm: [B, T, H], one per head, or [B, T, H, K], one per key channel; -inf
            forgets all.
        beta: write strength [B, T, H]; 1 replaces what the memory holds for k, 2 reflects it.
        scale: factor of the output; None is K^-1/2.
        initial_state: [N, H, K, V]; zeros when None.
        cu_seqlens: boundaries [N + 1] of packed sequences; B must be 1. N = B without it.

    Returns:
        o [B, T, H, V] in q.dtype and the final state [N, H, K, V] in float32 (float64 for float64 inputs), both
        differentiable in every tensor.

    Raises:
        ValueError: shapes or head sizes do not fit.
    """
    _check("gated_delta", q, k, v, log_decay, beta)
    shape = (beta.shape[2], q.shape[3], v.shape[3])
    state = start_state("gated_delta", q, cu_seqlens, shape, initial_state)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    gates = log_decay.to(state.dtype), beta.to(state.dtype)
    return _fwd(q, k, v, *gates, state, dense(cu_seqlens), float(scale))


def gated_delta_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    state: Tensor,
    *,
    scale: float | None = None,
    state_indices: Tensor | None = None,
) -> Tensor:
    """One token of `chunk_gated_delta`, without autograd.

    Args:
        q, k, v, log_decay, beta: one token [B, 1, ...], as in `chunk_gated_delta`.
        state: contiguous [B, H, K, V], updated IN PLACE; with `state_indices` pages [pages, H, K, V].
        scale: as in `chunk_gated_delta`.
        state_indices: int32 or int64 [B], the page of each row; see kernels/README.md.

    Returns:
        o [B, 1, H, V] in q.dtype.

    Raises:
        ValueError: more than one token, shapes that do not fit, or a state that is not contiguous.
    """
    _check("gated_delta", q, k, v, log_decay, beta)
    expected = (q.shape[0], beta.shape[2], q.shape[3], v.shape[3])
    check_step_states("gated_delta_step", q.shape[1], (state,), (expected,), state_indices)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return _step(q, k, v, log_decay, beta, state, state_indices, float(scale))
