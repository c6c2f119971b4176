"""Prompts for texts that SmolLM2 writes itself: a piece of the training text, and what is to be done with it.

    python training/experiments/smollm2/own_prompts.py --tokenizer SMOLLM2 --data .scratch/smollm2 --out prompts.jsonl
    memmix sample-teacher --teacher SMOLLM2 --prompts prompts.jsonl --out .scratch/smollm2/own --max-new-tokens 256

`arms.py` trains on them with `own=.25`.
"""

import json
import random
from pathlib import Path
from typing import Annotated

import numpy
import typer
from transformers import AutoTokenizer

TASKS = (
    "Summarize this text in two sentences.",
    "What is this text about?",
    "List the main points of this text.",
    "Write three questions that this text answers, and their answers.",
    "Explain this text to a beginner.",
    "Which names, places or programs does this text mention?",
    "Write this text again in simple words.",
    "Give this text a title, and say why it fits.",
)
FEWEST, MOST = 96, 384  # tokens of a piece


def main(
    tokenizer: Annotated[Path, typer.Option(help="folder of the teacher")],
    data: Annotated[Path, typer.Option(help="folder of the token files of corpus.py")],
    out: Annotated[Path, typer.Option(help="JSON lines, each a conversation")],
    count: Annotated[int, typer.Option(help="number of prompts")] = 16384,
    seed: Annotated[int, typer.Option(help="seed of pieces and tasks")] = 0,
) -> None:
    """Write the prompts."""
    reader, draw = AutoTokenizer.from_pretrained(tokenizer), random.Random(seed)
    tokens = numpy.load(data / "train.npy", mmap_mode="r")
    with out.open("w", encoding="utf-8") as file:
        for _ in range(count):
            size = draw.randint(FEWEST, MOST)
            place = draw.randrange(len(tokens) - size)
            piece = reader.decode(tokens[place : place + size].tolist(), skip_special_tokens=True).strip("\ufffd \n")
            asked, first = draw.choice(TASKS), draw.random() < 0.5
            content = f"{asked}\n\n{piece}" if first else f"{piece}\n\n{asked}"
            file.write(json.dumps({"messages": [{"role": "user", "content": content}]}, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    typer.run(main)
