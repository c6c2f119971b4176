"""The names of the mixers, for checks that come before a mixer, which needs torch, is imported; and the defaults."""

import sys

from .errors import UserError

ATTENTION = "attention"  # stands in `mixer_types` for a layer that stays attention
DEFAULT_MIXER = "window"  # of a conversion; README.md, "Quality", says why
DEFAULT_WINDOW = 512  # tokens, or those of the sliding window of the layer's attention where it is shorter
DEFAULT_SINKS = 1  # first tokens that a window reads: without them the KL doubles (training/experiments/smollm2)
BUILT_IN = ("window", "coffee", "gated_delta", "gka", "kda", "lattice", "mamba2", "ska")


def mixer_names() -> tuple[str, ...]:
    """The registered mixers; those of this package, as long as none has been imported."""
    return tuple(getattr(sys.modules.get("hf_memmix.mixers"), "MIXERS", BUILT_IN))


def check_mixer_name(name: str) -> None:
    """Raise UserError unless there is a mixer of this name."""
    if name not in (known := mixer_names()):
        raise UserError(f"mixer {name!r} is unknown; registered: {', '.join(known)}")
