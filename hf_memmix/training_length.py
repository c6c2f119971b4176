"""Refuses a training step in which a mixer learns nothing, because no sequence is long enough for it."""

from torch import nn
from transformers.utils import is_torchdynamo_compiling

from .errors import UserError
from .mixer_names import DEFAULT_WINDOW
from .mixers import ATTENTION, MemoryMixer
from .token_layout import TokenLayout

EVERY_MIXER = 2  # tokens; a loss of the next token takes two


def slow_learners(model: nn.Module) -> list[MemoryMixer]:
    """The mixers of a model that need more tokens than others to learn, also a memory beside a window."""
    mixers = (module for module in model.modules() if isinstance(module, MemoryMixer))
    return [mixer for mixer in mixers if mixer.minimum_training_length(mixer.options) > EVERY_MIXER]


def training_lengths(base: nn.Module) -> dict[str, int]:
    """`MemoryMixer.minimum_training_length` of those mixers of a model that need more tokens than others, by name."""
    return {mixer.name: mixer.minimum_training_length(mixer.options) for mixer in slow_learners(base)}


def only_window(config) -> int | None:
    """The tokens of the windows of a model without other mixers, else None. Up to this length they are attention.

    Where they differ, the shorter ones are attention at every length: the backbone's own windows are as short.
    """
    kinds = {*config.mixer_types} - {ATTENTION}
    return config.mixers["window"]["window"] or DEFAULT_WINDOW if kinds == {"window"} else None


def check_training_length(base: nn.Module, length: int, layout: TokenLayout):
    """Raise ValueError if a mixer that is trained gets no gradient from sequences that short.

    A compiled graph does not read the lengths of padded and packed sequences.

    Args:
        base: has the attribute `training_lengths`.
        length: tokens of a row in this process.
        layout: how they lie.
    """
    if layout.ranks is not None:
        length = layout.ranks.tokens()  # with the pads: a process does not know those of others
    elif (layout.rows is not None or layout.cu_seqlens is not None) and not is_torchdynamo_compiling():
        length = int((layout.cu_seqlens.diff() if layout.rows is None else layout.rows.lengths).max())
    for name, least in base.training_lengths.items():
        if length >= least:
            continue
        mixers = (mixer for mixer in slow_learners(base) if mixer.name == name)
        if any(parameter.requires_grad for mixer in mixers for parameter in mixer.parameters()):
            raise UserError(
                f"the longest sequence of this batch has {length} tokens, but {name} learns only from sequences of at"
                f" least {least}, so its parameters would get no gradient: give longer sequences, or convert with a"
                f" smaller chunk_size of {name}; to compute without training, call model.eval() or use"
                " torch.no_grad()"
            )
