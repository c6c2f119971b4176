"""The window op: checks of the arguments, choice of the path, registration of the step with torch.library."""

import torch
from torch import Tensor

from .._common import check_cu_seqlens, check_heads, compute_dtype
from .._dispatch import native_library, use_triton
from .._groups import flat
from .._pages import check_step_states
from .._registration import chunk_op, module, or_zeros, step_op
from .arguments import Reach, Results, Sizes, States, Tokens, Upstream
from .native_path import runs_native, window_step_native
from .torch_path import (
    after_past,
    is_causal,
    window_attention,
    window_bwd_torch,
    window_fwd_torch,
    window_states,
    window_step_torch,
)

State = tuple[Tensor, Tensor, Tensor]


def _kernels(q: Tensor) -> bool:
    return use_triton(q, "window", q.shape[-1])


@chunk_op("hf_memmix::window_fwd")
@flat(Tokens, Reach)
def _fwd(x: Tokens, reach: Reach) -> tuple[Tensor, Tensor]:
    fwd = module(".launch", __package__).window_fwd_triton if _kernels(x.q) else window_fwd_torch
    return fwd(*x, *reach)


@_fwd.register_fake
def _(q, *rest):
    lse = q.new_empty(q.shape[2], q.shape[0] * q.shape[1], dtype=compute_dtype(q.dtype))
    return torch.empty_like(q, memory_format=torch.contiguous_format), lse


@chunk_op("hf_memmix::window_bwd")
@flat(Upstream, Tokens, Results, Reach)
def _bwd(upstream: Upstream, x: Tokens, results: Results, reach: Reach) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if not _kernels(x.q):
        return window_bwd_torch(*upstream, *x, *reach)
    return module(".launch", __package__).window_bwd_triton(*upstream, *x, *results, *reach)


@_bwd.register_fake
def _(do, q, k, v, o, lse, sink_logits, *rest):
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    return dq, dk, dv, lse.new_empty(0 if sink_logits is None else q.shape[2])


def _setup_context(ctx, inputs, output):
    *tensors, ctx.window, ctx.sinks, ctx.scale, ctx.softcap = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.set_materialize_grads(False)


def _backward(ctx, do, dlse):
    *x, sink_logits, cu_seqlens, seen, o, lse = ctx.saved_tensors
    reach = Reach(sink_logits, cu_seqlens, seen, ctx.window, ctx.sinks, ctx.scale, ctx.softcap)
    *grads, dsink_logits = _bwd(or_zeros(do, o), *x, o, lse, *reach)
    dsink_logits = None if sink_logits is None else dsink_logits.to(sink_logits.dtype)
    return *grads, dsink_logits, None, None, None, None, None, None


_fwd.register_autograd(_backward, setup_context=_setup_context)


@step_op("hf_memmix::window_step", mutates_args=("keys", "values", "seen"))
@flat(Tokens, States, Sizes)
def _step(x: Tokens, states: States, sizes: Sizes) -> Tensor:
    if runs_native(x, states) and (library := native_library("window", *x, *states)):
        return window_step_native(library, x, states, sizes)
    step = module(".launch", __package__).window_step_triton if _kernels(x.q) else window_step_torch
    return step(*x, *states, *sizes)


@_step.register_fake
def _(q, *rest):
    return torch.empty_like(q, memory_format=torch.contiguous_format)


def window_state_shapes(batch: int, kv_heads: int, head_dim: int, window: int, sinks: int) -> tuple[tuple, ...]:
    """Shapes of the keys, the values and the count of tokens, see `chunk_window`."""
    slots = (batch, sinks + window, kv_heads, head_dim)
    return slots, slots, (batch, kv_heads)


def _check(op: str, q: Tensor, k: Tensor, v: Tensor, window: int, sinks: int, sink_logits: Tensor | None):
    check_heads(op, q, k, v)
    if k.shape[-1] != v.shape[-1]:
        raise ValueError(f"{op}: keys and values must have one head size, got {k.shape[-1]} and {v.shape[-1]}")
    if window < 1 or not 0 <= sinks <= window:
        raise ValueError(f"{op}: window={window} must be at least 1, and sinks={sinks} from 0 to the window")
    if sink_logits is not None and sink_logits.shape != q.shape[2:3]:
        raise ValueError(f"{op}: sink_logits must be [H] = [{q.shape[2]}], got {list(sink_logits.shape)}")


def chunk_window(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window: int,
    sinks: int = 0,
    scale: float | None = None,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    initial_state: State | None = None,
    lengths: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    final_state: bool = True,
) -> tuple[Tensor, State | None]:
    """Softmax attention over the last tokens of a sequence, and over its first ones.

        o_t = sum_s softmax(scale q_t k_s) v_s  over  t - window < s <= t  and  s < sinks

    Time and memory are linear in T.

    Args:
        q: [B, T, H, D].
        k, v: [B, T, Hk, D]; Hk divides H, and head h reads head h // (H / Hk).
        window: W, the number of last tokens that a query reads, with its own.
        sinks: S <= W, the number of first tokens that every query reads as well.
        scale: factor of the scores; None is D^-1/2.
        softcap: c in c tanh(scores / c); None for no cap.
        sink_logits: [H], a further logit per head that takes a share of the softmax and adds no value.
        initial_state: keys and values [N, S + W, Hk, D] and the count of tokens [N, Hk] of int64, as this function
            returns them; None at the begin of the sequences.
        lengths: [B]; row b ends after lengths[b] tokens, and later ones do not enter its state.
        cu_seqlens: boundaries [N + 1] of packed sequences; B must be 1. N = B without it.
        final_state: whether the state after the tokens is needed.

    Returns:
        o [B, T, H, D] in q.dtype, and the final state or None, differentiable in every tensor but the counts. The
        first S tokens fill the slots 0 to S - 1, then token p stands in slot S + (p - S) mod W.

    Raises:
        ValueError: shapes or sizes do not fit.
    """
    _check("window", q, k, v, window, sinks, sink_logits)
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, q.shape[0])
    seen, after = None if initial_state is None else initial_state[2][:, 0], None
    scale = float(q.shape[-1] ** -0.5 if scale is None else scale)
    softcap = None if softcap is None else float(softcap)
    reach = Reach(sink_logits, cu_seqlens, seen, window, sinks, scale, softcap)
    if final_state or (sinks and initial_state is not None):
        after = window_states(initial_state, k, v, reach, lengths)
    if initial_state is not None:
        k, v = after_past(initial_state, after, k, v, reach)
    return _outputs(Tokens(q, k, v), reach), after if final_state else None


def _outputs(x: Tokens, reach: Reach) -> Tensor:
    exporting = torch.compiler.is_exporting()  # an exported program keeps the op: blocks depend on the length
    if not exporting and (is_causal(x, reach) or not x.q.shape[1] or not _kernels(x.q)):
        return window_attention(x, reach)
    return _fwd(*x, *reach)[0]


def window_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: State,
    *,
    window: int,
    sinks: int = 0,
    scale: float | None = None,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    state_indices: Tensor | None = None,
) -> Tensor:
    """One token of `chunk_window`, without autograd.

    Args:
        q, k, v: one token [B, 1, heads, D].
        state: as in `chunk_window`, contiguous, updated IN PLACE; with `state_indices` pages [pages, ...].
        state_indices: int32 or int64 [B], the page of each row; see kernels/README.md.

    Returns:
        o [B, 1, H, D] in q.dtype.

    Raises:
        ValueError: more than one token, shapes that do not fit, or a state that is not contiguous.
    """
    _check("window_step", q, k, v, window, sinks, sink_logits)
    shapes = window_state_shapes(q.shape[0], k.shape[2], k.shape[3], window, sinks)
    check_step_states("window_step", q.shape[1], tuple(state), shapes, state_indices)
    scale = float(q.shape[-1] ** -0.5 if scale is None else scale)
    softcap = None if softcap is None else float(softcap)
    return _step(q, k, v, sink_logits, *state, state_indices, window, sinks, scale, softcap)
