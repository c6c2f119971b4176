"""One token of all short convolutions of a layer, and the rotation and unit norm of the heads after them, in one call.

    z = short_conv_step(x);  y = R z / (|R z| + eps), or z

Apart, they are a kernel per convolution and one per norm, each of which takes longer to start than to run; on a CPU a
call takes longer than its arithmetic. Here is the torch path; op.py has the operator and the choice of
the path, launch_token.py the kernel, native_path.py the native code.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .._pages import read_pages, write_pages
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
        head_dim: the head size D, or 0 if the output stays as it is; those with heads come first.
    """

    x: Tensor
    weight: Tensor | None
    state: Tensor | None
    head_dim: int


def heads_torch(a: Heads) -> list[Tensor]:
    """The outputs of `unit_heads_after_convolutions`, computed as those of one convolution and one tensor of heads."""
    widths, states = [t.shape[-1] for t in a.x], read_pages(a.state_indices, *a.states)
    joined = torch.cat(states, 1)
    y = short_conv_step_torch(*Token(torch.cat(a.x, -1), torch.cat(a.weights), None, joined, None, a.silu, None))
    for state, new in zip(states, joined.split(widths, 1), strict=True):
        state.copy_(new)
    write_pages(a.state_indices, a.states, states)
    dims = [dim for dim in a.head_dims if dim]
    heads, rest = y.split([sum(widths[: len(dims)]), sum(widths[len(dims) :])], -1)
    heads = unit_heads_torch(heads.unflatten(-1, (-1, dims[0])), a.cos, a.sin, a.eps).flatten(2)
    return [*heads.split(widths[: len(dims)], -1), *rest.split(widths[len(dims) :], -1)]
