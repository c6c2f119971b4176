"""The arguments of the ska op in groups, as every path takes them; shapes as in `chunk_ska`."""

from typing import NamedTuple

from torch import Tensor


class State(NamedTuple):
    """The five tensors of a state, see state.py; a decode step updates them, or their pages, in place."""

    statistics: Tensor
    operator: Tensor
    previous: Tensor
    nu: Tensor
    position: Tensor


class Tokens(NamedTuple):
    """Queries, masked keys and values, and the factor eta gamma^K of the output [H]."""

    q: Tensor
    k: Tensor
    v: Tensor
    gain: Tensor


class Ends(NamedTuple):
    """Where sequences end: boundaries of packed ones, or lengths of padded ones."""

    cu_seqlens: Tensor | None
    lengths: Tensor | None


class Upstream(NamedTuple):
    """The gradients of the output and of the first four states; `position` is not differentiable."""

    do: Tensor
    d_statistics: Tensor
    d_operator: Tensor
    d_previous: Tensor
    d_nu: Tensor


class Estimate(NamedTuple):
    """How the operator is computed from the statistics."""

    power: int
    eps: float
    spectral_norm: bool
    sigma_floor: float


class Chunks(NamedTuple):
    """Tokens between two estimates of the operator."""

    chunk_size: int


class Refresh(NamedTuple):
    """Of a decode step: the page of each row, tokens between two estimates, and whether every token makes one."""

    state_indices: Tensor | None
    chunk_size: int
    per_token: bool


FORWARD = (Tokens, State, Ends, Chunks, Estimate)
STEP = (Tokens, State, Refresh, Estimate)
