"""The arguments of the short_conv op in groups, as every path takes them; shapes as in `short_conv`."""

from typing import NamedTuple

from torch import Tensor


class Inputs(NamedTuple):
    """Of the op; `bias` and `initial_state` may be None, as may what says where sequences end."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    initial_state: Tensor | None
    cu_seqlens: Tensor | None
    lengths: Tensor | None
    silu: bool
    limit: float | None


class Upstream(NamedTuple):
    """The gradients of the results."""

    dy: Tensor
    dstate: Tensor


class Token(NamedTuple):
    """Of a decode step: one token [B, 1, C]. `state` [B, C, K-1], or its pages, is shifted in place."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    state: Tensor
    state_indices: Tensor | None
    silu: bool
    limit: float | None


class Heads(NamedTuple):
    """The arguments of `unit_heads_after_convolutions` as every path takes them; lists have one item a convolution."""

    x: list[Tensor]
    weights: list[Tensor]
    states: list[Tensor]
    head_dims: list[int]
    cos: Tensor | None
    sin: Tensor | None
    eps: float
    silu: bool
    state_indices: Tensor | None


class Prompt(NamedTuple):
    """The tensors and numbers of `prompt_heads`. Tapes take tensors, not lists."""

    q: Tensor
    k: Tensor
    v: Tensor
    w_q: Tensor
    w_k: Tensor
    w_v: Tensor | None
    s_q: Tensor | None
    s_k: Tensor | None
    s_v: Tensor | None
    cos: Tensor | None
    sin: Tensor | None
    silu: bool
    eps: float
    head_dim: int
