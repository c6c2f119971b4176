"""Collects the text and code that the recall teacher is trained on, and writes its tokenizer and token files.

    python training/experiments/recall_teacher/corpus.py --out .scratch/recall \\
        --record training/experiments/recall_teacher/sources.json

Reads about 90 MB of text in Debian packages (`common/debian_text.py`): prose, a dictionary, documentation, and source
code of four languages. A further domain, the documentation of PostgreSQL, is held out as a whole. A byte-level BPE is
learnt on part of the training text.

Writes `tokenizer.json`, and for each split `<split>.npy`: its tokens as one stream, uint16, each document followed by
`<|endoftext|>`. The record holds packages, versions, licences, sizes and hashes. Needs apt, dpkg and network access
to a Debian mirror.
"""

import hashlib
import tempfile
from pathlib import Path
from typing import Annotated

import numpy
import typer

from hf_memmix.conversion.records import write_json
from hf_memmix.training.experiments.bundled import fetch_text
from hf_memmix.training.experiments.bundled.pretrain_teacher import END, train_tokenizer
from hf_memmix.training.experiments.common import debian_text
from hf_memmix.training.experiments.common.debian_text import FURTHER_PACKAGES, SOURCES

SHORTEST = 400  # characters of a document


def main(
    out: Annotated[Path, typer.Option(help="folder for the tokenizer and the token files")],
    record: Annotated[Path, typer.Option(help="JSON file for sources, licences and hashes")],
    unpacked: Annotated[Path | None, typer.Option(help="folder of packages that are unpacked already")] = None,
    vocab_size: int = 8192,
    tokenizer_bytes: Annotated[int, typer.Option(help="training text that the tokenizer is learnt on")] = 10_000_000,
) -> None:
    """Collect, split and tokenize the texts."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        packages = [source[0] for source in SOURCES.values()] + FURTHER_PACKAGES
        versions = fetch_text.unpack(packages, Path(scratch)) if unpacked is None else {}
        found, sizes = debian_text.collect(unpacked or Path(scratch) / "root", SOURCES, SHORTEST)
    splits = {split: [text for _, text in documents] for split, documents in found.items()}
    sample, size = [], 0
    for text in splits["train"]:
        sample.append(text)
        size += len(text.encode())
        if size > tokenizer_bytes:
            break
    tokenizer = train_tokenizer(f"\n{END}\n".join(sample), vocab_size, 2048)
    tokenizer.save_pretrained(out)
    report = {"sources": debian_text.record_of(SOURCES, versions, sizes), "files": {}}
    for split, documents in splits.items():
        tokens = debian_text.tokens_of(tokenizer, documents, tokenizer.convert_tokens_to_ids(END))
        numpy.save(out / f"{split}.npy", tokens)
        report["files"][f"{split}.npy"] = debian_text.file_record(tokens, documents)
        print(split, report["files"][f"{split}.npy"], flush=True)
    report["tokenizer.json"] = {"sha256": hashlib.sha256((out / "tokenizer.json").read_bytes()).hexdigest()}
    write_json(record, report, indent=2)


if __name__ == "__main__":
    typer.run(main)
