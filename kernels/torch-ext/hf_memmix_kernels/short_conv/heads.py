"""One token of all short convolutions of a layer, and the rotation and unit norm of the heads after them, in one call.

    z = short_conv_step(x);  y = R z / (|R z| + eps), or z

Apart, they are a kernel per convolution and one per norm, each of which takes longer to start than to run; on a CPU a
call takes longer than its arithmetic. Here is the torch path; op.py has the operator and the choice of
the path, launch_token.py the kernel, native_path.py the native code.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..rowwise.torch_path import unit_heads_torch
from .arguments import Heads, Token
from .torch_path import short_conv_step_torch

MAX_HEAD = 1024  # head size of the kernel, which holds a head in registers


class Convolution(NamedTuple):
    """A convolution of `unit_heads_after_convolutions` (T = 1) or `prompt_heads`.

    Attributes:
        x: [B, T, C].
        weight: [C, K]. `prompt_heads` takes None for v: no convolution.
        state: [B, C, K-1] or, for one token, its pages. `prompt_heads` takes None: zeros.
        head_dim: the head size D, or 0 if the output stays as it is.
    """

    x: Tensor
    weight: Tensor | None
    state: Tensor | None
    head_dim: int


def heads_torch(a: Heads) -> Tensor:
    """The outputs of `unit_heads_after_convolutions`, one after the other in one flat tensor."""
    outputs = []
    for token, weight, state, dim in zip(a.x, a.weights, a.states, a.head_dims, strict=True):
        y = short_conv_step_torch(*Token(token, weight, None, state, a.state_indices, a.silu, None))
        outputs.append(unit_heads_torch(y.unflatten(-1, (-1, dim)), a.cos, a.sin, a.eps) if dim else y)
    return torch.cat([y.flatten() for y in outputs])
