"""Refuses a training step in which a mixer learns nothing, because no sequence is long enough for it."""

from torch import Tensor, nn
from transformers.utils import is_torchdynamo_compiling

from .errors import UserError
from .padding import PaddedRows
from .swap import memory_mixers

EVERY_MIXER = 2  # tokens; a loss of the next token takes two


def training_lengths(base: nn.Module) -> dict[str, int]:
    """`MemoryMixer.minimum_training_length` of those mixers of a model that need more tokens than others, by name."""
    lengths = {mixer.name: mixer.minimum_training_length(mixer.options) for mixer in memory_mixers(base).values()}
    return {name: length for name, length in lengths.items() if length > EVERY_MIXER}


def check_training_length(base: nn.Module, length: int, rows: PaddedRows | None, boundaries: Tensor | None):
    """Raise ValueError if a mixer that is trained gets no gradient from sequences that short.

    A compiled graph does not read the lengths of padded and packed sequences.

    Args:
        base: has the attribute `training_lengths`.
        length: tokens of a row.
        rows: the padded rows, or None.
        boundaries: [N + 1], of packed sequences, or None.
    """
    if (rows is not None or boundaries is not None) and not is_torchdynamo_compiling():
        length = int((boundaries.diff() if rows is None else rows.lengths).max())
    for name, least in base.training_lengths.items():
        if length >= least:
            continue
        mixers = (mixer for mixer in memory_mixers(base).values() if mixer.name == name)
        if any(parameter.requires_grad for mixer in mixers for parameter in mixer.parameters()):
            raise UserError(
                f"the longest sequence of this batch has {length} tokens, but {name} learns only from sequences of at"
                f" least {least}, so its parameters would get no gradient: give longer sequences, or convert with a"
                f" smaller chunk_size of {name}; to compute without training, call model.eval() or use"
                " torch.no_grad()"
            )
