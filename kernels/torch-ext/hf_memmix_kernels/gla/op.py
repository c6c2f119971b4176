"""The gla op: checks of the arguments, choice of the path, registration with torch.library."""

from torch import Tensor

from .. import _native_memory
from .._common import check_shared_heads, dense, start_state
from .._dispatch import use_triton
from .._groups import flat
from .._pages import check_step_states
from .._registration import chunk_op, module, or_zeros, step_op
from .arguments import Inputs, Token, Upstream
from .torch_path import gla_bwd_torch, gla_fwd_torch, gla_step_torch

CHUNK_SIZES = (16, 32, 64, 128)


@chunk_op("hf_memmix::gla_fwd")
@flat(Inputs)
def _fwd(a: Inputs) -> tuple[Tensor, Tensor]:
    if library := _native_memory.library_for("gla", a.initial_state, *a[:7]):
        return _native_memory.forward(library, "gla", a)
    fwd = module(".launch", __package__).gla_fwd_triton if use_triton(a.q, "gla") else gla_fwd_torch
    return fwd(*a)


@_fwd.register_fake
@flat(Inputs)
def _(a):
    return a.q.new_empty(*a.log_decay.shape, a.v.shape[-1]), a.initial_state.new_empty(a.initial_state.shape)


@chunk_op("hf_memmix::gla_bwd")
@flat(Upstream, Inputs)
def _bwd(upstream: Upstream, a: Inputs) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    if library := _native_memory.library_for("gla", a.initial_state, *a[:7], *upstream):
        grads = _native_memory.backward(library, "gla", upstream, a)
    else:
        bwd = module(".launch", __package__).gla_bwd_triton if use_triton(a.q, "gla") else gla_bwd_torch
        grads = bwd(*upstream, *a)
    *grads, dbeta, dskip, dinitial = grads
    # results of a registered op are tensors
    dbeta, dskip = (a.log_decay.new_empty(0) if t is None else t for t in (dbeta, dskip))
    return *grads, dbeta, dskip, dinitial


@_bwd.register_fake
@flat(Upstream, Inputs)
def _(upstream, a):
    dbeta, dskip = (a.log_decay.new_empty((0,) if t is None else t.shape) for t in (a.beta, a.skip))
    dq, dk, dv, dg, dinitial = (t.new_empty(t.shape) for t in (a.q, a.k, a.v, a.log_decay, a.initial_state))
    return dq, dk, dv, dg, dbeta, dskip, dinitial


def _setup_context(ctx, inputs, output):
    *tensors, ctx.scale, ctx.chunk_size = inputs
    ctx.save_for_backward(*tensors)
    ctx.set_materialize_grads(False)


def _backward(ctx, do, dfinal):
    tensors = ctx.saved_tensors
    q, _, v, log_decay, beta, skip, initial_state, _ = tensors
    do, dfinal = or_zeros(do, q, (*log_decay.shape, v.shape[-1])), or_zeros(dfinal, initial_state)
    *grads, dbeta, dskip, dinitial = _bwd(do, dfinal, *tensors, ctx.scale, ctx.chunk_size)
    dbeta, dskip = (None if t is None else dt for t, dt in ((beta, dbeta), (skip, dskip)))
    return *grads, dbeta, dskip, dinitial, None, None, None


_fwd.register_autograd(_backward, setup_context=_setup_context)


@step_op("hf_memmix::gla_step", mutates_args=("state",))
@flat(Token)
def _step(token: Token) -> Tensor:
    if library := _native_memory.library_for("gla", token.state, *token[:7]):
        return _native_memory.step(library, "gla", token)
    if use_triton(token.q, "gla"):
        from .launch import gla_step_triton as step
    else:
        step = gla_step_torch
    return step(*token)


@_step.register_fake
def _(q, k, v, log_decay, *rest):
    return q.new_empty(*log_decay.shape, v.shape[-1])


def _check(op: str, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor | None, skip: Tensor | None):
    """Raise ValueError unless the shapes fit together, see `chunk_gla`."""
    gates = {"log_decay": log_decay, "beta": beta}
    heads = check_shared_heads(op, q, k, v)
    for name, gate in gates.items():
        if gate is not None and gate.shape != heads:
            raise ValueError(f"{op}: {name} must be [B, T, H] = {tuple(heads)}, got {tuple(gate.shape)}")
    if skip is not None and skip.shape != heads[2:]:
        raise ValueError(f"{op}: skip must be [H] = {tuple(heads[2:])}, got {tuple(skip.shape)}")


def chunk_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor | None = None,
    skip: Tensor | None = None,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor]:
    """Linear attention with one decay per head.

        S_t = e^g S_{t-1} + beta_t k_t v_t^T,  o_t = scale * S_t^T q_t + skip v_t

    The H heads either have queries of their own and share keys and values in groups (Hq = H, Hv = Hk), as in
    attention, or they have values of their own and share queries and keys (Hq = Hk, Hv = H), as in Mamba-2. Head h
    reads head h // (H / Hq) of q, and so on. Shared heads are read by index and never copied. A padded token has
    log_decay = 0 and either v = 0 or beta = 0, so it leaves the state as it is.

    Args:
        q: [B, T, Hq, K], K <= 256.
        k, v: [B, T, Hk, K], [B, T, Hv, V], V <= 256.
        log_decay: g <= 0 [B, T, H]; -inf forgets all.
        beta: write strength [B, T, H]; None is 1.
        skip: factor [H] of v in the output; None is 0.
        scale: factor of the output; None is K^-1/2.
        initial_state: [N, H, K, V]; zeros when None.
        cu_seqlens: boundaries [N + 1] of packed sequences; B must be 1. N = B without it.
        chunk_size: tokens per chunk, one of 16, 32, 64, 128.

    Returns:
        o [B, T, H, V] in q.dtype and the final state [N, H, K, V] in float32 (float64 for float64 inputs), both
        differentiable in every tensor.

    Raises:
        ValueError: shapes, head sizes or the chunk size do not fit.
    """
    _check("gla", q, k, v, log_decay, beta, skip)
    if chunk_size not in CHUNK_SIZES:
        raise ValueError(f"gla: chunk_size={chunk_size} is not one of {CHUNK_SIZES}")
    shape = (log_decay.shape[2], q.shape[3], v.shape[3])
    state = start_state("gla", q, cu_seqlens, shape, initial_state)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    gates = (None if t is None else t.to(state.dtype) for t in (log_decay, beta, skip))
    return _fwd(q, k, v, *gates, state, dense(cu_seqlens), float(scale), chunk_size)


def gla_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    state: Tensor,
    *,
    beta: Tensor | None = None,
    skip: Tensor | None = None,
    scale: float | None = None,
    state_indices: Tensor | None = None,
) -> Tensor:
    """One token of `chunk_gla`, without autograd.

    Args:
        q, k, v, log_decay, beta: one token [B, 1, ...], as in `chunk_gla`; skip [H].
        state: contiguous [B, H, K, V], updated IN PLACE; with `state_indices` pages [pages, H, K, V].
        scale: as in `chunk_gla`.
        state_indices: int32 or int64 [B], the page of each row; see kernels/README.md.

    Returns:
        o [B, 1, H, V] in q.dtype.

    Raises:
        ValueError: more than one token, shapes that do not fit, or a state that is not contiguous.
    """
    _check("gla", q, k, v, log_decay, beta, skip)
    expected = (q.shape[0], log_decay.shape[2], q.shape[3], v.shape[3])
    check_step_states("gla_step", q.shape[1], (state,), (expected,), state_indices)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return _step(q, k, v, log_decay, beta, skip, state, state_indices, float(scale))
