"""One token of all short convolutions of a layer, and the rotation and unit norm of the heads after them, in one call.

    z = short_conv_step(x);  y = R z / (|R z| + eps), or z

Apart, they are a kernel per convolution and one per norm, each of which takes longer to start than to run; on a CPU a
call takes longer than its arithmetic. Here are the choice between the paths, the operator and its torch path.
launch_heads.py has the kernel, native_path.py the native code.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .._dispatch import native_library, use_triton
from .._registration import all_plain, needs_op
from ..rowwise.torch_path import unit_heads_torch
from .native_path import heads_native, runs_native_step
from .torch_path import short_conv_step_torch

MAX_HEAD = 1024  # head size of the kernel, which holds a head in registers


class Convolution(NamedTuple):
    """A convolution of `unit_heads_after_convolutions`: x [B, 1, C], weight [C, K], state [B, C, K-1] or its pages,
    and the head size D, or 0 if the output stays as it is."""

    x: Tensor
    weight: Tensor
    state: Tensor
    head_dim: int


def heads_torch(
    x: list[Tensor],
    weights: list[Tensor],
    states: list[Tensor],
    head_dims: list[int],
    cos: Tensor | None,
    sin: Tensor | None,
    eps: float,
    silu: bool,
    state_indices: Tensor | None,
) -> Tensor:
    """The outputs of `unit_heads_after_convolutions`, one after the other in one flat tensor."""
    outputs = []
    for token, weight, state, dim in zip(x, weights, states, head_dims, strict=True):
        y = short_conv_step_torch(token, weight, None, state, state_indices, silu, None)
        outputs.append(unit_heads_torch(y.unflatten(-1, (-1, dim)), cos, sin, eps) if dim else y)
    return torch.cat([y.flatten() for y in outputs])


@torch.library.custom_op("hf_memmix::short_conv_heads", mutates_args=("states",))
def _heads_op(
    x: list[Tensor],
    weights: list[Tensor],
    states: list[Tensor],
    head_dims: list[int],
    cos: Tensor | None,
    sin: Tensor | None,
    eps: float,
    silu: bool,
    state_indices: Tensor | None,
) -> Tensor:  # of one tensor, because an op that changes its arguments cannot return a list
    path = _heads_triton if use_triton(x[0], "short_conv") else heads_torch
    return path(x, weights, states, head_dims, cos, sin, eps, silu, state_indices)


@_heads_op.register_fake
def _(x, weights, states, head_dims, cos, sin, eps, silu, state_indices):
    return x[0].new_empty(sum(t.numel() for t in x))


def _heads_triton(*args) -> Tensor:
    from .launch_heads import heads_triton

    return heads_triton(*args)


def _op_is_faster(x: Tensor) -> bool:
    """Whether a compiled program should call the op. On a CPU, torch.compile fuses the operators itself."""
    return x.is_cuda


def unit_heads_after_convolutions(
    convolutions: list[Convolution],
    cos: Tensor | None,
    sin: Tensor | None,
    eps: float,
    silu: bool,
    state_indices: Tensor | None,
) -> list[Tensor] | None:
    """One token: `short_conv_step` of each convolution, then `unit_heads` of its output, in one call of native code or
    one kernel, without autograd.

    Arguments are not checked.

    Args:
        convolutions: all with the same number of taps K and, where they have heads, one head size.
        cos, sin: [B, 1, r] as of `unit_heads`, or None.
        eps: added to the norms.
        silu: whether the activation is SiLU or none.
        state_indices: pages of the states, int32 or int64 [B], or None.

    Returns:
        The outputs [B, 1, C]; or None if neither native code nor the kernel can run, or if gradients are needed.
    """
    x, weights, states, head_dims = ([c[i] for c in convolutions] for i in range(4))
    tensors, first = (*x, *weights, *states, cos, sin), x[0]
    through_op = needs_op(tensors)
    if through_op and not _op_is_faster(first):  # first: torch.compile would make a guard of every other condition
        return None
    if torch.is_grad_enabled() or not all_plain(tensors):
        return None
    if max(head_dims) > MAX_HEAD or (cos is not None and 2 * cos.shape[-1] > max(head_dims)):
        return None  # `unit_heads` has a message for the second
    for c in convolutions:
        if c.x.dtype != first.dtype or not (state_indices is not None or c.state.is_contiguous()):
            return None
    arguments = (x, weights, states, head_dims, cos, sin, eps, silu, state_indices)
    if through_op:
        return _split(_heads_op(*arguments), x)
    if first.is_cpu and _runs_native(convolutions, cos, sin):
        library = native_library("short_conv", first, *tensors)
        if library is not None:
            return heads_native(library, *arguments)
    if not use_triton(first, "short_conv") or torch._C._are_functorch_transforms_active():
        return None
    return _split(_heads_triton(*arguments), x)


def _split(y: Tensor, x: list[Tensor]) -> list[Tensor]:
    """The parts of a flat tensor, with the shapes of x."""
    return [part.view(t.shape) for part, t in zip(y.split([t.numel() for t in x]), x, strict=True)]


def _runs_native(convolutions: list[Convolution], cos: Tensor | None, sin: Tensor | None) -> bool:
    """Whether native code can run them: all tensors have one dtype."""
    if cos is not None and not cos.dtype == sin.dtype == convolutions[0].x.dtype:
        return False
    return all(runs_native_step(c.x, c.weight, None, c.state) for c in convolutions)
