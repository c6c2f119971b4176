"""The rowwise functions: checks of the arguments, choice of the path, autograd.

They keep no state and are not registered with torch.library. torch.compile traces the plain operators of the torch
path and fuses them with the operators before and after them.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from .._dispatch import native_library, use_triton
from .._registration import eager_function, module, needs_op
from .native_path import decay_native, gated_norm_native, heads_native, runs_native
from .torch_path import (
    ACTIVATIONS,
    decay_torch,
    forward_kl_torch,
    gated_norm_torch,
    gated_product_torch,
    rotate_torch,
    unit_heads_torch,
)

MAX_ROW = 16384  # elements per row; a program of the kernels holds a row in registers


def runs_kernels(x: Tensor, *others: Tensor | None) -> bool:
    """Whether the functions run their Triton kernels on these tensors, one for a function and one for its gradient."""
    return not needs_op((x, *others)) and use_triton(x, "rowwise") and 0 < x.shape[-1] <= MAX_ROW


def _native(x: Tensor, *others: Tensor | None, one_dtype: bool = True):
    """The native code, if it should compute a function of these tensors; else None."""
    if x.is_cuda or needs_op((x, *others)):  # first: torch.compile would make a guard of every other condition
        return None
    for t in others if one_dtype else ():
        if t is not None and t.dtype != x.dtype:
            return None
    return native_library("rowwise", x, *others) if runs_native(x, *others) else None


launch = functools.partial(module, ".launch", __package__)


def _unit_context(ctx, inputs, output):
    *tensors, ctx.eps = inputs
    ctx.save_for_backward(*tensors)


def _unit_bwd(ctx, dy):
    return launch().unit_heads_bwd_triton(dy, *ctx.saved_tensors, ctx.eps), None, None, None


def _rotate_context(ctx, inputs, output):
    ctx.save_for_backward(*inputs[1:])


def _rotate_bwd(ctx, dy):
    return launch().rotate_triton(dy, *ctx.saved_tensors, True), None, None


def _norm_context(ctx, inputs, output):
    y, gate, weight, *ctx.options = inputs
    ctx.save_for_backward(y, gate, weight)


def _norm_bwd(ctx, do):
    dy, dgate, dweight = launch().gated_norm_bwd_triton(do, *ctx.saved_tensors, *ctx.options)
    return dy, dgate, dweight, None, None, None, None, None


def _product_context(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _product_bwd(ctx, do):
    return launch().gated_product_bwd_triton(do, *ctx.saved_tensors)


def _decay_context(ctx, inputs, output):
    *tensors, ctx.limit, ctx.smallest, ctx.largest = inputs
    ctx.save_for_backward(*tensors)
    ctx.set_materialize_grads(False)


def _decay_bwd(ctx, ddt, dg):
    grads = launch().decay_bwd_triton(ddt, dg, *ctx.saved_tensors, ctx.limit, ctx.smallest, ctx.largest)
    return *grads, None, None, None


def _function(name: str, backward: Callable, setup_context: Callable) -> Callable:
    return eager_function(name, lambda *args: getattr(launch(), f"{name}_fwd_triton")(*args), backward, setup_context)


_unit_heads = _function("unit_heads", _unit_bwd, _unit_context)
_rotate = eager_function("rotate", lambda *args: launch().rotate_triton(*args, False), _rotate_bwd, _rotate_context)
_gated_norm = _function("gated_norm", _norm_bwd, _norm_context)
_decay = _function("decay", _decay_bwd, _decay_context)
_gated_product = _function("gated_product", _product_bwd, _product_context)


def _check_heads(name: str, x: Tensor, cos: Tensor | None, sin: Tensor | None):
    if x.dim() != 4:
        raise ValueError(f"{name}: x must be [B, T, H, D], got {tuple(x.shape)}")
    if cos is not None and (
        cos.shape != sin.shape or cos.shape[:-1] != x.shape[:2] or not 0 < 2 * cos.shape[-1] <= x.shape[-1]
    ):
        raise ValueError(
            f"{name}: cos and sin must be [B={x.shape[0]}, T={x.shape[1]}, r] with 0 < 2 r <= {x.shape[-1]}, got"
            f" {tuple(cos.shape)} and {tuple(sin.shape)}"
        )


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding per head: y = R x.

    Args:
        x: [B, T, H, D].
        cos, sin: [B, T, r] with 2 r <= D, one angle per pair of channels (i, i + r). Channels from 2 r on are not
            rotated. cos and sin get no gradient.

    Returns:
        y [B, T, H, D] in x's dtype.

    Raises:
        ValueError: the shapes do not fit.
    """
    _check_heads("rotate", x, cos, sin)
    if library := _native(x, cos, sin):
        return heads_native(library, x, cos, sin)
    return _rotate(x, cos, sin) if runs_kernels(x, cos, sin) else rotate_torch(x, cos, sin)


def unit_heads(x: Tensor, cos: Tensor | None, sin: Tensor | None, eps: float) -> Tensor:
    """Rotary embedding, then unit norm per head: y = R x / (|R x| + eps).

    Args:
        x: [B, T, H, D].
        cos, sin: [B, T, r] with 2 r <= D, one angle per pair of channels (i, i + r). Channels from 2 r on are not
            rotated. None means no rotation. cos and sin get no gradient.
        eps: added to the norm.

    Returns:
        y [B, T, H, D] in x's dtype, computed in float32 (float64 for float64 inputs).

    Raises:
        ValueError: the shapes do not fit, or only one of cos and sin is given.
    """
    if (cos is None) != (sin is None):
        raise ValueError("unit_heads: only one of cos and sin is given; pass both, or neither for no rotation")
    _check_heads("unit_heads", x, cos, sin)
    if library := _native(x, cos, sin):
        return heads_native(library, x, cos, sin, eps)
    if not runs_kernels(x, cos, sin):
        return unit_heads_torch(x, cos, sin, eps)
    return _unit_heads(x, cos, sin, eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor | None:
    """x / rms(x) * weight by the code of `gated_norm`, without its checks; None if only its torch path could run."""
    if library := _native(x, weight):
        return gated_norm_native(library, x, None, weight, eps, None, True, None, None)
    return _gated_norm(x, None, weight, eps, None, True, None, None) if runs_kernels(x, weight) else None


def gated_norm(
    y: Tensor,
    gate: Tensor | None,
    weight: Tensor,
    eps: float,
    *,
    activation: str | None = "silu",
    norm_first: bool = True,
    limit: float | None = None,
    gate_limit: float | None = None,
    average_over_ranks: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """RMSNorm with a gate: y / rms(y) * weight * act(gate), or, with `norm_first=False`, u / rms(u) * weight with
    u = y * act(gate).

    Args:
        y: [..., D]; the norm is over D.
        gate: a tensor of y's shape; None means no gate.
        weight: [D]; or [G D], with one weight per group and channel, where G is y.shape[-2].
        eps: added to the mean square.
        activation: activation function of the gate, "silu" or "gelu".
        norm_first: whether the norm is computed before the gate is applied.
        limit, gate_limit: y and the gate are clamped to [-limit, limit] first; None means no limit.
        average_over_ranks: the mean of a tensor over the ranks of tensor parallelism, if each rank has a part of D.

    Returns:
        The shape and dtype of y, computed in float32 (float64 for float64 inputs).

    Raises:
        ValueError: the shapes do not fit, or the activation is unknown.
    """
    if gate is not None and gate.shape != y.shape:
        raise ValueError(f"gated_norm: gate must have the shape of y, {tuple(y.shape)}, got {tuple(gate.shape)}")
    groups, rest = divmod(weight.numel(), max(1, y.shape[-1]))
    if weight.dim() != 1 or rest or not (groups == 1 or (y.dim() > 1 and groups == y.shape[-2])):
        raise ValueError(
            f"gated_norm: weight must be [D={y.shape[-1]}], or [G D] with G = y.shape[-2], got {tuple(weight.shape)}"
        )
    if gate is not None and activation not in ACTIVATIONS:
        raise ValueError(f"gated_norm: activation={activation!r} is not one of {list(ACTIVATIONS)}")
    options = (eps, activation, norm_first, limit, gate_limit)
    if average_over_ranks is None and (library := _native(y, gate, weight)):
        return gated_norm_native(library, y, gate, weight, *options)
    if average_over_ranks is not None or not runs_kernels(y, gate, weight):
        return gated_norm_torch(y, gate, weight, *options, average_over_ranks)
    return _gated_norm(y, gate, weight, *options)


def gated_product(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, the product of a SwiGLU MLP.

    Args:
        gate, up: tensors of one shape and dtype.

    Returns:
        A tensor of this shape and dtype, computed in float32 (float64 for float64 inputs).

    Raises:
        ValueError: the shapes or dtypes differ.
    """
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise ValueError(
            f"gated_product: gate and up must have one shape and dtype, got {tuple(gate.shape)} {gate.dtype} and"
            f" {tuple(up.shape)} {up.dtype}"
        )
    if needs_op((gate, up)) or not use_triton(gate, "rowwise"):
        return gated_product_torch(gate, up)
    return _gated_product(gate, up)


def decay(
    x: Tensor,
    bias: Tensor,
    A_log: Tensor,
    *,
    limit: float | None = None,
    smallest: float | None = None,
    largest: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Step sizes and log-decays of heads: dt = softplus(x + bias), g = -e^A_log dt (Mamba-2, Gated DeltaNet, GKA).

    Args:
        x: [B, T, H].
        bias, A_log: [H].
        limit: x is clamped to [-limit, limit] first; None means no limit.
        smallest, largest: dt is clamped to this range; None means no limit.

    Returns:
        dt and g [B, T, H] in float32 (float64 for float64 inputs).

    Raises:
        ValueError: the shapes do not fit.
    """
    if x.dim() != 3 or bias.shape != x.shape[-1:] or A_log.shape != x.shape[-1:]:
        raise ValueError(
            f"decay: x must be [B, T, H], bias and A_log [H], got {tuple(x.shape)}, {tuple(bias.shape)} and"
            f" {tuple(A_log.shape)}"
        )
    if library := _native(x, bias, A_log, one_dtype=False):
        return decay_native(library, x, bias, A_log, limit, smallest, largest)
    if not runs_kernels(x, bias, A_log):
        return decay_torch(x, bias, A_log, limit, smallest, largest)
    return _decay(x, bias, A_log, limit, smallest, largest)


@torch.no_grad()
def forward_kl_(student: Tensor, teacher: Tensor, weight: Tensor | None = None) -> Tensor:
    """KL(teacher || student) = sum_v p_t (log p_t - log p_s) of every row of logits; the student's logits are replaced
    by the gradient of sum_n weight_n KL_n, which is weight_n (p_s - p_t).

    So a loss over a vocabulary needs no tensor of its size beside the logits. Autograd does not see this function.

    Args:
        student, teacher: [N, V]. `student` is changed.
        weight: [N], e.g. 1 at the tokens that count; None: all ones. It does not change the result, only the gradient.

    Returns:
        [N] in float32 (float64 for a float64 student), in which sums and exponentials are computed.

    Raises:
        ValueError: the shapes do not fit.
    """
    if student.dim() != 2 or teacher.shape != student.shape:
        raise ValueError(
            f"forward_kl_: student and teacher must be [N, V], got {tuple(student.shape)} and {tuple(teacher.shape)}"
        )
    if weight is None:
        weight = torch.ones(student.shape[0], device=student.device)
    if weight.shape != student.shape[:1]:
        raise ValueError(f"forward_kl_: weight must be [N={student.shape[0]}], got {tuple(weight.shape)}")
    by_rows = student.stride(1) == teacher.stride(1) == 1 and weight.is_contiguous()
    if by_rows and not needs_op((student, teacher, weight)) and use_triton(student, "rowwise"):
        return launch().forward_kl_triton(student, teacher, weight)
    return forward_kl_torch(student, teacher, weight)
