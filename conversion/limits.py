"""Limits of a model: its longest sequence, and checks that student and teacher fit together."""

import math
from collections.abc import Iterable

from torch import Tensor, nn

from hf_memmix.backbones import backbone_of
from hf_memmix.conversion.model_files import check_limit
from hf_memmix.errors import UserError

RESIZE = "train it with them first (model.resize_token_embeddings), or leave them out of the text"


def limit_of(model: nn.Module) -> float:
    """The longest sequence that a model may read: a transformer's `max_position_embeddings`.

    A model with memory layers has no limit, unless its backbone has a learned table of positions.
    """
    config = model.config
    if hasattr(config, "mixer_types") and backbone_of(config).rotary is not None:
        return math.inf
    return getattr(config, "max_position_embeddings", None) or math.inf


def check_length(model: nn.Module, role: str, length: int, name: str, remedy: str) -> None:
    """Raise ValueError if a model cannot read `length` tokens; `name`: the option that holds this length."""
    check_limit(limit_of(model), role, length, name, remedy)


def check_tokens(ids: Iterable[int], model: nn.Module, tokenizer, name: str) -> None:
    """Raise ValueError if a token is outside a model's vocabulary, e.g. one that was added to the tokenizer alone.

    name: the option that holds the text.
    """
    size = model.get_input_embeddings().num_embeddings
    if outside := sorted({token for token in ids if token >= size}):
        raise UserError(
            f"{name} holds {tokenizer.convert_ids_to_tokens(outside[0])!r}, token {outside[0]}, but the model has"
            f" {size} tokens; {RESIZE}"
        )


def check_vocabulary(tokens: Tensor, size: int) -> None:
    """Raise ValueError if a token of a text is outside a vocabulary of `size` tokens."""
    if (highest := int(tokens.max())) >= size:
        raise UserError(f"token {highest} is outside the vocabulary of {size}; use the teacher's own tokenizer")


def tokens_without_embedding(tokenizer, vocabulary: int) -> list[str]:
    """The tokens of a tokenizer that a model with this size of the vocabulary cannot read."""
    known = tokenizer.get_vocab()
    return sorted((token for token, number in known.items() if number >= vocabulary), key=known.__getitem__)


def check_vocabularies(student: nn.Module, teacher: nn.Module) -> None:
    """Raise ValueError if the vocabularies of two models have different sizes."""
    if teacher.config.vocab_size != student.config.vocab_size:
        raise UserError(
            f"the teacher's vocabulary has {teacher.config.vocab_size} tokens, the student's"
            f" {student.config.vocab_size}; give the teacher the student came from"
        )
