"""The arguments of the op in groups, as every path takes them; shapes as in `chunk_gated_delta`."""

from typing import NamedTuple

from torch import Tensor


class Inputs(NamedTuple):
    """Of the forward pass: gates and states in the dtype of sums; `cu_seqlens` may be None."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor
    beta: Tensor
    initial_state: Tensor
    cu_seqlens: Tensor | None
    scale: float


class Gates(NamedTuple):
    """Of a layer's decode step: what the decays and the write strength are computed from.

    Attributes:
        down, up: weights of the decays, [H or H K, hidden] after None, or [H or H K, rank] after [rank, hidden].
        beta: weights of the write strength [H, hidden].
        dt_bias, A_log: see `rowwise.decay`: [H or H K] and [H].
        strength: beta is strength * sigmoid.
    """

    down: Tensor | None
    up: Tensor
    beta: Tensor
    dt_bias: Tensor
    A_log: Tensor
    strength: float


class Upstream(NamedTuple):
    """The gradients of the results."""

    do: Tensor
    dfinal: Tensor


class Token(NamedTuple):
    """Of a decode step: one token [B, 1, ...]. `state` [B, H, K, V], or its pages, is updated in place."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor
    beta: Tensor
    state: Tensor
    state_indices: Tensor | None
    scale: float
