"""In which form does the teacher itself answer questions about one of four sentences in a long text?

    python training/experiments/smollm2/probe_forms.py --teacher .scratch/smollm2_teacher \\
        --out training/experiments/smollm2/results/probe_forms.json

A probe in which the teacher is below 80 % says more about the question than about a student. Forms are compared by the
teacher's answers alone, on development text; no student is read. The ways to ask: "text", the sentence begins again
and the model goes on; "question", in words, with "Answer:" and the beginning of the sentence; "chat", the same in the
chat template.
"""

import random
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer

from hf_memmix.assets import asset_path
from hf_memmix.conversion import load_model
from hf_memmix.conversion.records import markdown_table
from hf_memmix.training.evaluation.probes import Material
from hf_memmix.training.evaluation.probes.counted import wilson
from hf_memmix.training.evaluation.probes.grid import DEPTHS
from hf_memmix.training.evaluation.probes.score import score
from hf_memmix.training.evaluation.probes.tasks import CODE, SENTENCES, THINGS, Form, pairs_of
from hf_memmix.training.experiments.common.harness import Experiment, check_time, device, measured_at
from hf_memmix.training.experiments.common.options import Options, check_names
from hf_memmix.training.experiments.smollm2 import measuring
from hf_memmix.training.text_files import read_text, text_record

FORMS = {
    "the code of": (CODE,),
    "has the": (Form("{} has the", "What does{} have?"),),
    "is looking for the": (Form("{} is looking for the", "What is{} looking for?"),),
    "six things of": THINGS,
    "six sentences": SENTENCES,
}
WAYS = ("text", "question", "chat")
BATCH_TOKENS = 16384


def rows_to_run(done: list[dict], args) -> list[dict]:
    cells = [(length, form, way) for length in args.lengths for form in FORMS for way in args.ways]
    return [{"form": form, "way": way, "length": length} for length, form, way in cells]


def run(row: dict, args) -> dict:
    """The teacher's choice and exact answers in one form."""
    material = Material(measuring.tokenizer_of(args.teacher), read_text(args.text), row["way"] == "chat")
    forms = tuple(replace(form, in_words=row["way"] == "question") for form in FORMS[row["form"]])
    samples = []
    for number in range(args.samples * len(DEPTHS)):
        draw = random.Random(f"{measuring.CHOICE_SEED} {row['length']} {number}")
        depth = DEPTHS[number % len(DEPTHS)]
        samples.append(pairs_of(material, row["length"], depth, draw, forms))
    teacher, size, scores = teacher_of(args.teacher), max(1, BATCH_TOKENS // row["length"]), []
    for begin in range(0, len(samples), size):
        check_time(args)
        scores += score(teacher, samples[begin : begin + size], size, control=False)
    found = {"answers": len(scores)}
    for measure in ("choice", "exact"):
        share = sum(getattr(one, measure) for one in scores) / len(scores)
        found |= {measure: share, f"{measure}_interval": list(wilson(share, len(scores)))}
    return found


def teacher_of(folder: Path):
    """The teacher in bf16, as it is stored, also on a CPU."""
    if folder not in _loaded:
        _loaded[folder] = load_model(folder, dtype=torch.bfloat16).to(device())
    return _loaded[folder]


_loaded: dict = {}


def table(results: dict) -> str:
    """One line per form, one column per length and way."""
    settings, forms, widths = results["settings"], {}, []
    for row in results["rows"]:
        forms.setdefault(row["form"], {})[row["length"], row["way"]] = _text(row)
        widths += [high - low for low, high in (row.get(f"{m}_interval", (0, 0)) for m in ("choice", "exact"))]
    columns = [(length, way) for length in settings["lengths"] for way in settings["ways"]]
    lines = [[form, *(cells.get(column, "") for column in columns)] for form, cells in forms.items()]
    note = (
        f"The teacher's choice / exact in percent, by length, of {settings['samples'] * len(DEPTHS)} answers each; an"
        f" interval of 95 % is at most {100 * max(widths):.0f} points wide. {measured_at(results)}."
    )
    head = ["form", *(f"{length:,}, {way}" for length, way in columns)]
    return f"{markdown_table(head, lines)}\n\n{note}"


def _text(row: dict) -> str:
    return f"{100 * row['choice']:.0f} / {100 * row['exact']:.0f}" if "choice" in row else ""


class Settings(Options):
    teacher: Annotated[Path, typer.Option(help="folder of the teacher")]
    text: Annotated[Path, typer.Option(help="text around the sentences")] = asset_path("dev.txt")
    lengths: Annotated[list[int], typer.Option(help="lengths of the sequences; repeatable")] = (256, 1024, 4096, 8192)
    ways: Annotated[list[str], typer.Option(help="ways to ask; repeatable")] = WAYS
    samples: Annotated[int, typer.Option(help="sequences per depth")] = 40


def about(args) -> dict:
    return {"model": measuring.model_record(args.teacher), "text": text_record(args.text)}


def check(args) -> None:
    check_names("--ways", args.ways, WAYS)


main = Experiment("probe_forms", __file__, Settings, rows_to_run, check, about).command()

if __name__ == "__main__":
    typer.run(main)
