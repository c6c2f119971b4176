"""The token files that `corpus.py` writes, and the probes' material from them."""

import copy
import json
from pathlib import Path

import numpy
from transformers import AutoTokenizer

from hf_memmix.training.drills import unseen_of
from hf_memmix.training.evaluation.probes import Material

WORDS = "words.json"
KEYS, VALUES = 1024, 128  # as many as `Material` has
MATERIAL_TOKENS = 150_000  # tokens of a split from which filler, keys and values of the probes are taken


def tokens_of(folder: Path, split: str) -> numpy.ndarray:
    """The tokens [N] uint16 of a split."""
    return numpy.load(folder / f"{split}.npy", allow_pickle=False)


def material_of(folder: Path, split: str) -> Material:
    """The probes' material from the first tokens of a split."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return Material(tokenizer, tokenizer.decode(tokens_of(folder, split)[:MATERIAL_TOKENS].tolist()))


def write_words(folder: Path, keys: list, values: list) -> None:
    """Write keys and values of the drills for probes: no two have the same first token, and no value that of a key."""
    first, pools = set(), {"values": [], "keys": []}
    for name, words, most in (("values", values, VALUES), ("keys", keys, KEYS)):
        for text, tokens in words:
            if len(pools[name]) < most and tokens[0] not in first:
                first.add(tokens[0])
                pools[name].append((text, tokens))
    (folder / WORDS).write_text(json.dumps(pools), encoding="utf-8")


def with_drill_words(material: Material, folder: Path) -> Material:
    """The material with keys and values of the drills, in the same filler."""
    pools, other = json.loads((folder / WORDS).read_text(encoding="utf-8")), copy.copy(material)
    for name, words in pools.items():
        setattr(other, name, [(text, tuple(tokens)) for text, tokens in words])
    return other


def probe_materials(folder: Path, split: str = "heldout", filler: str | None = None) -> dict[str, Material]:
    """The material of each kind of words.

    "new" words are no words of any drill, but three of four may be single tokens in drills of MQAR; the fourth part of
    them that is "unseen" is not. "drills" has words of the drills.

    filler: the split that filler is taken from, if it is not `split`.
    """
    new = material_of(folder, split)
    if filler is not None:
        new.filler = tokens_of(folder, filler)[:MATERIAL_TOKENS].tolist()
    return {"new": new, "unseen": unseen_of(new), "drills": with_drill_words(new, folder)}
