"""Writes the rows on which all students are aligned and distilled, real text and drills in turn, and words for probes.

python training/experiments/recall_teacher/distillation_rows.py --data .scratch/recall --out .scratch/recall/rows.npy
"""

import random
from pathlib import Path
from typing import Annotated

import numpy
import typer
from transformers import AutoTokenizer

from hf_memmix.training.drills import DrillMaterial, row_of
from hf_memmix.training.experiments.recall_teacher.texts import material_of, tokens_of, write_words


def main(
    data: Annotated[Path, typer.Option(help="folder that corpus.py wrote")],
    out: Annotated[Path, typer.Option(help="the .npy file to write")],
    rows: int = 2048,
    length: Annotated[int, typer.Option(help="tokens of a row")] = 2048,
    seed: int = 1,
) -> None:
    """Write [rows, length] tokens, uint16; every second row is drills."""
    tokenizer = AutoTokenizer.from_pretrained(data)
    material = DrillMaterial(tokenizer, tokens_of(data, "train"), material_of(data, "heldout"))
    draw = random.Random(f"words {seed}")
    write_words(out.parent, *(draw.sample(words, len(words)) for words in (material.keys, material.values)))
    draw = random.Random(f"rows {seed}")
    table = [row_of(material, length, draw)[0] if i % 2 else material.window(length, draw) for i in range(rows)]
    numpy.save(out, numpy.array(table, dtype=numpy.uint16))
    print(f"{rows} rows of {length} tokens in {out}")


if __name__ == "__main__":
    typer.run(main)
