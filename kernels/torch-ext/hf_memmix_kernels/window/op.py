"""The window op: checks of the arguments, choice of the path, registration of the step with torch.library."""

import torch
from torch import Tensor

from .._common import check_cu_seqlens, check_heads, compute_dtype
from .._dispatch import use_triton
from .._groups import flat
from .._pages import check_step_states
from .._registration import chunk_op, module, step_op
from .arguments import Reach, Results, Sizes, States, Tokens, Upstream
from .torch_path import (
    Reads,
    Scores,
    in_order,
    last_of_packed,
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
    lse = q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=compute_dtype(q.dtype))
    return torch.empty_like(q, memory_format=torch.contiguous_format), lse


@chunk_op("hf_memmix::window_bwd")
@flat(Upstream, Tokens, Results, Reach)
def _bwd(upstream: Upstream, x: Tokens, results: Results, reach: Reach) -> tuple[Tensor, Tensor, Tensor]:
    if not _kernels(x.q):
        return window_bwd_torch(*upstream, *x, *reach)
    return module(".launch", __package__).window_bwd_triton(*upstream, *x, *results, *reach)


@_bwd.register_fake
def _(do, q, k, v, *rest):
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))


def _setup_context(ctx, inputs, output):
    q, k, v, firsts, *ctx.options = inputs
    ctx.save_for_backward(q, k, v, *output, firsts)
    ctx.set_materialize_grads(False)


def _backward(ctx, do, dlse):
    q, *rest = ctx.saved_tensors
    do = torch.zeros_like(q) if do is None else do
    return *_bwd(do, q, *rest, *ctx.options), None, None, None, None


_fwd.register_autograd(_backward, setup_context=_setup_context)


@step_op("hf_memmix::window_step", mutates_args=("keys", "values", "seen"))
@flat(Tokens, States, Sizes)
def _step(x: Tokens, states: States, sizes: Sizes) -> Tensor:
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
    x, reads = Tokens(q, k, v), Reads(window, sinks, Scores(scale, softcap, sink_logits))
    if cu_seqlens is None:
        return _chunk(x, reads, initial_state, lengths, final_state)
    check_cu_seqlens(cu_seqlens, q.shape[0])
    if initial_state is None and not sinks:
        place = torch.arange(q.shape[1], device=q.device)
        sequence = torch.searchsorted(cu_seqlens[1:].contiguous(), place.to(cu_seqlens.dtype), right=True)
        firsts = cu_seqlens[sequence.clamp_max(len(cu_seqlens) - 2)].long()
        o = _outputs(x, reads, firsts=firsts)
        return o, last_of_packed(k, v, cu_seqlens, window) if final_state else None
    outputs, states = [], []
    for n, length in enumerate(cu_seqlens.diff().tolist()):
        start = int(cu_seqlens[n])
        own = None if initial_state is None else tuple(t[n : n + 1] for t in initial_state)
        part = Tokens(*(t[:, start : start + length] for t in x))
        o, state = _chunk(part, reads, own, None, final_state)
        outputs.append(o)
        states.append(state)
    ends = tuple(torch.cat(parts) for parts in zip(*states, strict=True)) if final_state else None
    return torch.cat(outputs, 1), ends


def _chunk(x: Tokens, reads: Reads, state, lengths, final_state: bool):
    (q, k, v), after = x, None
    if final_state or state is not None:
        ends = torch.full((q.shape[0],), q.shape[1], device=q.device) if lengths is None else lengths.long()
        after = window_states(state, k, v, ends, reads.window, reads.sinks)
    o = _outputs(x, reads, state, after)
    return o, after if final_state else None


def _outputs(x: Tokens, reads: Reads, state=None, after=None, firsts=None):
    """See `torch_path.window_attention`, which computes what the kernels do not."""
    (q, k, v), (window, sinks, scores) = x, reads
    exporting = torch.compiler.is_exporting()  # an exported program keeps the op: blocks depend on the length
    causal = not exporting and state is None and firsts is None and scores.softcap is None and q.shape[1] <= window
    kernels = exporting or (q.shape[1] > 0 and _kernels(q))
    if causal or sinks or scores.sink_logits is not None or not kernels:
        return window_attention(x, reads, state, after, firsts)
    firsts = None if firsts is None else firsts[None]
    if state is not None:
        k, v = (torch.cat(parts, 1) for parts in zip(in_order(state, window, sinks), (k, v), strict=True))
        firsts = window - 1 - state[2][:, :1]
    scale = float(q.shape[-1] ** -0.5 if scores.scale is None else scores.scale)
    softcap = None if scores.softcap is None else float(scores.softcap)
    return _fwd(q, k, v, firsts, window, scale, softcap)[0]


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
