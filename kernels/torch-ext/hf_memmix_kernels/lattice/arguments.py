"""The arguments of the lattice op in groups, as every path takes them; shapes as in `chunk_lattice`."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor


class Inputs(NamedTuple):
    """Of the op; without a forget gate, or where it is folded into gamma, `log_decay` is None."""

    q: Tensor
    k: Tensor
    v: Tensor
    gamma: Tensor
    log_decay: Tensor | None


class Gates(NamedTuple):
    """Of a layer's decode step: what step sizes and forget gates are computed from.

    Attributes:
        weights, biases: of the logits of gamma and of the forget gate, [H, hidden] and [H]; a weight or a bias that is
            None is zero, and no weight of the forget gate is no forget gate.
        softplus: gamma is the softplus of its logits; else `largest` times their sigmoid.
        enc_step: the largest gamma / mu of "enc".
        unit_eps: v of "enc" gets norm 1, see `rowwise.unit_heads`.
    """

    weights: Sequence[Tensor | None]
    biases: Sequence[Tensor | None]
    softplus: bool
    largest: float
    enc_step: float
    unit_eps: float


class Start(NamedTuple):
    """The state before the first token [N, H, d, m], and the boundaries of packed sequences."""

    initial_state: Tensor
    cu_seqlens: Tensor | None


class Rule(NamedTuple):
    """How a token is written."""

    variant: str
    project: bool
    l1: float


class Save(NamedTuple):
    """Whether forward keeps states for backward."""

    save: bool


class Upstream(NamedTuple):
    """The gradients of the results."""

    do: Tensor
    dfinal: Tensor


class Kept(NamedTuple):
    """What forward keeps for backward; each path has its own layout."""

    kept: Tensor


class Pages(NamedTuple):
    """Of a decode step: the state, or pages of it, which it updates in place, and the page of each row."""

    state: Tensor
    state_indices: Tensor | None


FORWARD = (Inputs, Start, Rule, Save)
BACKWARD = (Upstream, Inputs, Start, Kept, Rule)
STEP = (Inputs, Pages, Rule)
