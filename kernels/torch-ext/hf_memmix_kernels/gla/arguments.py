"""The arguments of the gla op in groups, as every path takes them; shapes as in `chunk_gla`."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor


class Inputs(NamedTuple):
    """Of the forward pass: gates and states in the dtype of sums; `beta`, `skip` and `cu_seqlens` may be None."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor
    beta: Tensor | None
    skip: Tensor | None
    initial_state: Tensor
    cu_seqlens: Tensor | None
    scale: float
    chunk_size: int


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
    beta: Tensor | None
    skip: Tensor | None
    state: Tensor
    state_indices: Tensor | None
    scale: float


class Mamba2(NamedTuple):
    """Of the decode step of a layer of Mamba-2 with H heads of P features, state size N and G groups.

    Attributes:
        x: the layer's input [1, 1, hidden].
        weights, biases: of the projections of the input, [2 H P + 2 G N + H, hidden] for z, x, B, C and dt, and of the
            output, as in nn.Linear; here and below a bias may be None.
        taps, conv_bias, past: weight [C, 1, K], bias and state [1, C, K - 1], updated IN PLACE, of the short
            convolution of x, B and C.
        norm: weight [H P] of the gated RMSNorm over the features of each group.
        A_log, D, dt_bias: [H].
        state: [1, H, N, P], contiguous, in float32, updated IN PLACE.
        eps: of the norm.
        limits: of the features, of the norm's input, and the smallest and the largest dt.
    """

    x: Tensor
    weights: Sequence[Tensor]
    biases: Sequence[Tensor | None]
    taps: Tensor
    conv_bias: Tensor | None
    past: Tensor
    norm: Tensor
    A_log: Tensor
    D: Tensor
    dt_bias: Tensor
    state: Tensor
    eps: float
    limits: tuple[float, float, float, float]
