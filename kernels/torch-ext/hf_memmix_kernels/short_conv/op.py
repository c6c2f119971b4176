"""The short_conv op: checks of the arguments, choice of the path, registration with torch.library."""

import functools

import torch
from torch import Tensor

from .._common import check_cu_seqlens, dense, num_sequences
from .._dispatch import native_library, use_triton
from .._groups import flat
from .._pages import check_step_states
from .._registration import all_plain, chunk_op, module, needs_op, op_is_faster, step_op
from .arguments import Heads, Inputs, Prompt, Token, Upstream
from .heads import MAX_HEAD, Convolution, heads_torch
from .native_path import (
    heads_native,
    runs_native,
    short_conv_bwd_native,
    short_conv_fwd_native,
    short_conv_step_native,
)
from .torch_path import short_conv_bwd_torch, short_conv_fwd_torch, short_conv_step_torch

MAX_TAPS = 16

_empty_like = functools.partial(torch.empty_like, memory_format=torch.contiguous_format)


def _native(a: Inputs, *others: Tensor):
    """The native code, if it should run on these tensors; else None."""
    if not runs_native(a.x, a.weight, a.bias, a.initial_state, *others):
        return None
    return native_library("short_conv", *a[:6], *others)


@chunk_op("hf_memmix::short_conv_fwd")
@flat(Inputs)
def _fwd(a: Inputs) -> tuple[Tensor, Tensor]:
    if library := _native(a):
        return short_conv_fwd_native(library, a)
    fwd = (
        module(".launch", __package__).short_conv_fwd_triton if use_triton(a.x, "short_conv") else short_conv_fwd_torch
    )
    return fwd(*a)


@_fwd.register_fake
@flat(Inputs)
def _(a):
    sequences = a.x.shape[0] if a.cu_seqlens is None else a.cu_seqlens.shape[0] - 1
    return _empty_like(a.x), a.x.new_empty(sequences, a.x.shape[2], a.weight.shape[1] - 1)


@chunk_op("hf_memmix::short_conv_bwd")
@flat(Upstream, Inputs)
def _bwd(upstream: Upstream, a: Inputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if library := _native(a, *upstream):
        grads = short_conv_bwd_native(library, upstream, a)
    elif use_triton(a.x, "short_conv"):
        grads = module(".launch", __package__).short_conv_bwd_triton(*upstream, *a)
    else:
        grads = short_conv_bwd_torch(*upstream, *a)
    dx, dweight, dbias, dinitial = grads
    of_bias = a.weight.dtype if a.bias is None else a.bias.dtype
    return dx, dweight.to(a.weight.dtype), dbias.to(of_bias), dinitial.to(a.x.dtype)


@_bwd.register_fake
@flat(Upstream, Inputs)
def _(upstream, a):
    dbias = a.weight.new_empty(a.weight.shape[0], dtype=(a.weight if a.bias is None else a.bias).dtype)
    return _empty_like(a.x), _empty_like(a.weight), dbias, _empty_like(upstream.dstate, dtype=a.x.dtype)


def _setup_context(ctx, inputs, output):
    *tensors, silu, limit = inputs
    ctx.save_for_backward(*tensors)
    ctx.options = silu, limit


def _backward(ctx, dy, dstate):
    _, _, bias, initial_state, *_ = tensors = ctx.saved_tensors
    dx, dweight, dbias, dinitial = _bwd(dy, dstate, *tensors, *ctx.options)
    dbias = None if bias is None else dbias
    dinitial = None if initial_state is None else dinitial.to(initial_state.dtype)
    return dx, dweight, dbias, dinitial, *[None] * 4


_fwd.register_autograd(_backward, setup_context=_setup_context)


@step_op("hf_memmix::short_conv_step", mutates_args=("state",))
@flat(Token)
def _step(token: Token) -> Tensor:
    if runs_native(*token[:4]) and (library := native_library("short_conv", *token[:4])):
        return short_conv_step_native(library, token)
    step = short_conv_step_torch
    if use_triton(token.x, "short_conv"):
        step = module(".launch", __package__).short_conv_step_triton
    return step(*token)


@_step.register_fake
def _(x, *rest):
    return _empty_like(x)


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> bool:
    if x.dim() != 3:
        raise ValueError(f"short_conv: x must be [B, T, C], got shape {tuple(x.shape)}.")
    if weight.dim() != 2 or weight.shape[0] != x.shape[2] or not 2 <= weight.shape[1] <= MAX_TAPS:
        raise ValueError(
            f"short_conv: weight must be [C={x.shape[2]}, K] with 2 <= K <= {MAX_TAPS}, got {tuple(weight.shape)}; "
            "squeeze a Conv1d weight [C, 1, K] first."
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"short_conv: bias must be [C={x.shape[2]}], got {tuple(bias.shape)}.")
    if activation not in (None, "silu"):
        raise ValueError(f"short_conv: activation must be None or 'silu', got {activation!r}.")
    return activation == "silu"


def short_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = "silu",
    limit: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    lengths: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Depthwise causal convolution over time with a fused activation and a carried state.

    Args:
        x: [B, T, C].
        weight: [C, K]; tap K-1 multiplies the current token.
        bias: [C] or None.
        activation: "silu" or None.
        limit: x is clamped to [-limit, limit] first, and its gradient is zero from there on; None means no limit.
        initial_state: [N, C, K-1], the K-1 inputs before the first token, oldest first; zeros when None.
        cu_seqlens: [N+1] integer offsets of packed sequences; B must be 1. N = B without it.
        lengths: [B] number of valid tokens of each right-padded row. At padded tokens y and dx are zero for every x.

    Returns:
        y [B, T, C] and the final state [N, C, K-1] (the last K-1 valid inputs), both in x.dtype. Sums run in float32
        (float64 for float64 inputs). Differentiable in x, weight, bias and initial_state, through both outputs.

    Raises:
        ValueError: a shape or option is not one of those above.
    """
    silu = _check(x, weight, bias, activation)
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, x.shape[0])
        if lengths is not None:
            raise ValueError("short_conv: pass cu_seqlens (packed) or lengths (right-padded rows), not both.")
    if lengths is not None and lengths.shape != (x.shape[0],):
        raise ValueError(f"short_conv: lengths must be [B={x.shape[0]}], got {tuple(lengths.shape)}.")
    expected = (num_sequences(x.shape[0], cu_seqlens), x.shape[2], weight.shape[1] - 1)
    if initial_state is not None and tuple(initial_state.shape) != expected:
        raise ValueError(f"short_conv: initial_state must be {expected}, got {tuple(initial_state.shape)}.")
    return _fwd(x, weight, dense(bias), initial_state, dense(cu_seqlens), dense(lengths), silu, limit)


def short_conv_step(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    activation: str | None = "silu",
    *,
    limit: float | None = None,
    state_indices: Tensor | None = None,
) -> Tensor:
    """One token of `short_conv`, without autograd.

    Args:
        x: [B, 1, C]; weight, bias, activation, limit: as in `short_conv`.
        state: [B, C, K-1], shifted IN PLACE; with `state_indices` pages [pages, C, K-1].
        state_indices: int32 or int64 [B], the page of each row; see kernels/README.md.

    Returns:
        y [B, 1, C] in x.dtype.

    Raises:
        ValueError: more than one token, or shapes or an activation that `short_conv` refuses.
    """
    silu = _check(x, weight, bias, activation)
    expected = (x.shape[0], x.shape[2], weight.shape[1] - 1)
    check_step_states("short_conv_step", x.shape[1], (state,), (expected,), state_indices, any_stride=True)
    return _step(x, weight, dense(bias), state, state_indices, silu, limit)


@torch.library.custom_op("hf_memmix::short_conv_heads", mutates_args=("states",))
@flat(Heads)
def _heads_op(heads: Heads) -> Tensor:
    if use_triton(heads.x[0], "short_conv"):
        return _heads_triton(heads)
    return torch.cat([y.flatten() for y in heads_torch(heads)])


@_heads_op.register_fake
def _(x, *rest):
    return x[0].new_empty(sum(t.numel() for t in x))


def _heads_triton(arguments: Heads) -> Tensor:
    return module(".launch_token", __package__).heads_triton(arguments)


def unit_heads_after_convolutions(
    convolutions: list[Convolution],
    cos: Tensor | None,
    sin: Tensor | None,
    eps: float,
    silu: bool,
    state_indices: Tensor | None,
) -> list[Tensor] | None:
    """One token: `short_conv_step` of each convolution, then `unit_heads` of its output, for all at once, without
    autograd.

    Native code checks no arguments. The other paths check the states only.

    Args:
        convolutions: all with the same number of taps K and, where they have heads, one head size.
        cos, sin: [B, 1, r] as of `unit_heads`, or None.
        eps: added to the norms.
        silu: whether the activation is SiLU or none.
        state_indices: pages of the states, int32 or int64 [B], or None.

    Returns:
        The outputs [B, 1, C]; or None where the functions apart are as fast, or if gradients are needed.

    Raises:
        ValueError: states or pages that `short_conv_step` refuses; no state has changed then.
    """
    x, weights, states, head_dims = ([c[i] for c in convolutions] for i in range(4))
    tensors, first = (*x, *weights, *states, cos, sin), x[0]
    through_op = needs_op(tensors)
    if through_op and not op_is_faster(first):  # first: torch.compile would make a guard of every other condition
        return None
    if torch.is_grad_enabled() or not all_plain(tensors):
        return None
    # benchmarks set MAX_HEAD to 0 to run the layers: this condition must stay before native code and the kernel
    if max(head_dims) > MAX_HEAD or (cos is not None and 2 * cos.shape[-1] > max(head_dims)):
        return None  # `unit_heads` has a message for the second
    for c in convolutions:
        if c.x.dtype != first.dtype or not (state_indices is not None or c.state.is_contiguous()):
            return None
    arguments = Heads(x, weights, states, head_dims, cos, sin, eps, silu, state_indices)
    if not through_op:
        if first.is_cpu and _runs_native(convolutions, cos, sin):
            library = native_library("short_conv", first, *tensors)
            if library is not None:
                return heads_native(library, arguments)
        if torch._C._are_functorch_transforms_active():
            return None
    shapes = tuple((c.x.shape[0], c.x.shape[2], c.weight.shape[1] - 1) for c in convolutions)
    check_step_states("short_conv_step", first.shape[1], tuple(states), shapes, state_indices, any_stride=True)
    if not through_op and not use_triton(first, "short_conv"):
        return heads_torch(arguments)
    return _split(_heads_op(*arguments) if through_op else _heads_triton(arguments), x)


def _split(y: Tensor, x: list[Tensor]) -> list[Tensor]:
    """The parts of a flat tensor, with the shapes of x."""
    return [part.view(t.shape) for part, t in zip(y.split([t.numel() for t in x]), x, strict=True)]


def _runs_native(convolutions: list[Convolution], cos: Tensor | None, sin: Tensor | None) -> bool:
    """Whether native code can run them: all tensors have one dtype."""
    if cos is not None and not cos.dtype == sin.dtype == convolutions[0].x.dtype:
        return False
    return all(runs_native(c.x, c.weight, None, c.state) for c in convolutions)


def runs_prompt_heads(x: Tensor) -> bool:
    """Whether `prompt_heads` may run for q like x, as far as it is known before its other arguments are made."""
    if needs_op((x,)):  # first: torch.compile would make a guard of every other condition
        return False
    if torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():
        return False
    return use_triton(x, "short_conv") and use_triton(x, "rowwise")


def prompt_heads(
    convolutions: list[Convolution], cos: Tensor | None, sin: Tensor | None, eps: float, silu: bool
) -> tuple[Tensor | None, ...] | None:
    """A sequence: `short_conv` of q, k and v, then `unit_heads` of q and k, in one call of kernels, without autograd.

    Args:
        convolutions: of q, k and v, see `Convolution`. q and k have heads of one size, v has 0.
        cos, sin: [B, T, r] as of `unit_heads`, or None.
        eps: added to the norms.
        silu: whether the activation is SiLU or none.

    Returns:
        q, k [B, T, H, D], v [B, T, C] and the final states of the three, None for v without a convolution; or None if
        the kernels cannot run, if gradients are needed, or if an argument does not fit: the functions have messages.
    """
    q, k, v = convolutions
    tensors = *(c.x for c in convolutions), *(c.weight for c in convolutions), *(c.state for c in convolutions)
    if not runs_prompt_heads(q.x) or not all_plain((*tensors, cos, sin)) or not q.x.numel():
        return None
    # benchmarks set MAX_HEAD to 0 to run the layers
    if not 0 < q.head_dim <= MAX_HEAD or k.head_dim != q.head_dim or v.head_dim:
        return None
    if q.weight is None or k.weight is None:
        return None
    if not (_fits(q, q.x) and _fits(k, q.x) and _fits(v, q.x)) or (cos is None) != (sin is None):
        return None
    if cos is not None:
        shape = cos.shape
        if shape != sin.shape or len(shape) != 3 or shape[:2] != q.x.shape[:2] or not 0 < 2 * shape[2] <= q.head_dim:
            return None
    return module(".launch_prompt", __package__).prompt_heads_triton(
        *Prompt(*tensors, cos, sin, silu, eps, q.head_dim)
    )


def _fits(c: Convolution, q: Tensor) -> bool:
    """Whether a sequence has the batch, length and dtype of q, and its weight, state and head size fit."""
    shape = c.x.shape  # each read of a shape takes time, and this runs in every layer
    if len(shape) != 3 or shape[:2] != q.shape[:2] or c.x.dtype != q.dtype:
        return False
    batch, _, channels = shape
    if c.head_dim and channels % c.head_dim:
        return False
    if c.weight is None:
        return c.state is None
    weight = c.weight.shape
    if len(weight) != 2 or weight[0] != channels or not 2 <= weight[1] <= MAX_TAPS:
        return False
    return c.state is None or c.state.shape == (batch, channels, weight[1] - 1)
