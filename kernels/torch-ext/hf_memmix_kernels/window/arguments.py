"""The arguments of the window op in groups, as every path takes them; shapes as in `chunk_window`."""

from typing import NamedTuple

from torch import Tensor


class Tokens(NamedTuple):
    """Of a sequence, or of a decode step. `after_past` puts the keys and values of a state before those of a
    sequence.
    """

    q: Tensor
    k: Tensor
    v: Tensor


class Results(NamedTuple):
    """The output and, per head and query [H, B T], the logarithm to base 2 of the sum of e^scores."""

    o: Tensor
    lse: Tensor


class Upstream(NamedTuple):
    """The gradient of the output."""

    do: Tensor


class Reach(NamedTuple):
    """What a query reads, and how. `seen` [N]: how many tokens a state holds of each sequence; None without states."""

    sink_logits: Tensor | None
    cu_seqlens: Tensor | None
    seen: Tensor | None
    window: int
    sinks: int
    scale: float
    softcap: float | None


class States(NamedTuple):
    """Keys, values and counts of tokens, or pages of them, which a decode step updates in place."""

    sink_logits: Tensor | None
    keys: Tensor
    values: Tensor
    seen: Tensor
    state_indices: Tensor | None


class Sizes(NamedTuple):
    """Of the ring and of its sinks, and what happens to scores."""

    window: int
    sinks: int
    scale: float
    softcap: float | None
