"""The arguments of the coffee op in groups, as every path takes them; shapes as in `chunk_coffee`."""

from typing import NamedTuple

from torch import Tensor


class Inputs(NamedTuple):
    """Tokens, parameters and the outer factor of the gate; the filter and the gate may be None."""

    u: Tensor
    lam: Tensor
    w: Tensor
    C: Tensor
    w_filter: Tensor | None
    gate: Tensor | None


class Parameters(NamedTuple):
    """Of a layer's decode step, [D, n] each; lam is -2 sigmoid(lam_logit), and the filter may be None."""

    lam_logit: Tensor
    w: Tensor
    C: Tensor
    w_filter: Tensor | None


class Start(NamedTuple):
    """The state before the first token [N, D, n]."""

    initial_state: Tensor


class Upstream(NamedTuple):
    """The gradients of the results."""

    dy: Tensor
    dfinal: Tensor


class Rule(NamedTuple):
    """The boundaries of packed sequences, and what the gate depends on."""

    cu_seqlens: Tensor | None
    feedback: str


class Save(NamedTuple):
    """Whether forward keeps checkpoints for backward."""

    save: bool


class Kept(NamedTuple):
    """The checkpoints; each path has its own layout."""

    checkpoints: Tensor


class Wanted(NamedTuple):
    """Whether the gradient of the gate is needed."""

    gate_grad: bool


class Pages(NamedTuple):
    """Of a decode step: the state, or pages of it, which it updates in place, and the page of each row."""

    state: Tensor
    state_indices: Tensor | None
    feedback: str


FORWARD = (Inputs, Start, Rule, Save)
BACKWARD = (Upstream, Inputs, Start, Kept, Rule, Wanted)
STEP = (Inputs, Pages)
