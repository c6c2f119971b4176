"""The token files that `corpus.py` writes, and the probes' material from them."""

from pathlib import Path

import numpy
from transformers import AutoTokenizer

from hf_memmix.training.evaluation.probes import Material

MATERIAL_TOKENS = 150_000  # tokens of a split from which filler, keys and values of the probes are taken


def tokens_of(folder: Path, split: str) -> numpy.ndarray:
    """The tokens [N] uint16 of a split."""
    return numpy.load(folder / f"{split}.npy", allow_pickle=False)


def material_of(folder: Path, split: str) -> Material:
    """The probes' material from the first tokens of a split."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return Material(tokenizer, tokenizer.decode(tokens_of(folder, split)[:MATERIAL_TOKENS].tolist()))
