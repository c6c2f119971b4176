"""The table of starts from attention, and how a mixer gets its row.

    @starts("gka", options=options_for)
    def take_over(mixer, attention): ...

A mixer without a row cannot be converted to. Both functions know plain weights (`AttentionWeights`), never a family.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from hf_memmix.conversion.attention_weights import AttentionWeights, TensorFate
from hf_memmix.mixers import MIXERS


@dataclass(frozen=True)
class Start:
    """How a layer of one mixer begins as an attention.

    `options(attention)`: the mixer's options under which it has a place for that attention, where they are not the
    defaults. `take_over(mixer, attention)`: fills the mixer in place and says what became of every entry of
    `attention.tensors()`; raises ValueError for what has no place.
    """

    options: Callable[[AttentionWeights], dict]
    take_over: Callable[[nn.Module, AttentionWeights], list[TensorFate]]


STARTS: dict[str, Start] = {}


def starts(name: str, options: Callable[[AttentionWeights], dict] = lambda attention: {}):
    """Function decorator: make `take_over` the start of the mixer that is registered under `name`.

    Raises:
        ValueError: that mixer has a start.
    """

    def register(take_over):
        if name in STARTS:
            raise ValueError(f"the mixer {name!r} has a start from attention already; remove one of the two")
        STARTS[name] = Start(options, take_over)
        return take_over

    return register


def start_of(name: str) -> Start:
    """The start of the mixer `name`. Raises ValueError if there is no such mixer or it has no start."""
    if name not in MIXERS:
        raise ValueError(f"mixer {name!r} is unknown; registered: {', '.join(MIXERS)}")
    if name in STARTS:
        return STARTS[name]
    mixer = MIXERS[name]
    if hasattr(mixer, "init_from_attention"):  # the contract before this table
        warnings.warn(
            f"{mixer.__name__}.init_from_attention: register the start of {name!r} by"
            " hf_memmix.conversion.from_attention.starts instead",
            DeprecationWarning,
            stacklevel=2,
        )
        return Start(getattr(mixer, "options_for", lambda attention: {}), mixer.init_from_attention)
    raise ValueError(
        f"layers of the mixer {name!r} cannot start from attention, train a model with them from scratch; mixers that"
        f" can: {', '.join(STARTS)}"
    )
