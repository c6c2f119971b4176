"""Does the teacher itself answer the drills? A divergence from a teacher that is wrong teaches nothing.

    python training/experiments/smollm2/drill_teacher.py --teacher .scratch/smollm2_teacher --data .scratch/smollm2 \\
        --out training/experiments/smollm2/results/drill_teacher.json

Rows as those of training (`training/fact_drills.py`), of other seeds. An answer is right if each of its tokens is the
likeliest one of the vocabulary. The distance of an answer is that from the last place where the same thing stands
before it.
"""

import math
import random
from pathlib import Path
from typing import Annotated

import typer

from hf_memmix.conversion.records import markdown_table
from hf_memmix.training.evaluation.probes.counted import wilson
from hf_memmix.training.evaluation.probes.material import Answer, Sample
from hf_memmix.training.evaluation.probes.score import score
from hf_memmix.training.experiments.common.harness import Experiment, check_time, measured_at
from hf_memmix.training.experiments.common.options import Options
from hf_memmix.training.experiments.smollm2 import measuring
from hf_memmix.training.fact_drills import facts
from hf_memmix.training.text_files import text_record

DISTANCES = (0, 64, 192, 384, 768)  # tokens, from which a group of answers begins
LIKELY = 0.5  # a target of so much probability is no guess


def rows_to_run(done: list[dict], args) -> list[dict]:
    return [{"row": number} for number in range(args.rows)]


def run(row: dict, args) -> dict:
    """The answers of one row: distance, whether they are exact, and nats per token."""
    check_time(args)
    material = measuring.drill_material_of(args.teacher, args.data)
    ids, spans = facts(material, args.length, random.Random(f"teacher {row['row']}"))
    sample = Sample(ids, ids, [Answer(start, stop) for start, stop in spans])
    scores = score(measuring.teacher_of(args.teacher), [sample], control=False)
    return {
        "distances": [distance_of(ids, start, stop) for start, stop in spans],
        "exact": [one.exact for one in scores],
        "nll": [round(one.nll, 4) for one in scores],
    }


def distance_of(ids: list[int], start: int, stop: int) -> int:
    """Tokens from an answer to the last place before it where the same tokens stand."""
    size = stop - start
    return next(start - at for at in range(start - size, -1, -1) if ids[at : at + size] == ids[start:stop])


def table(results: dict) -> str:
    """One line per group of distances, and one for all answers."""
    columns = ("distances", "exact", "nll")
    answers = [one for row in results["rows"] for one in zip(*(row[name] for name in columns), strict=True)]
    lines, ends = [], (*DISTANCES[1:], float("inf"))
    for least, end in (*zip(DISTANCES, ends, strict=True), (0, float("inf"))):
        found = [(exact, nll) for distance, exact, nll in answers if least <= distance < end]
        if not found:
            continue
        share = sum(exact for exact, _ in found) / len(found)
        low, high = wilson(share, len(found))
        sure = sum(math.exp(-nll) >= LIKELY for _, nll in found) / len(found)
        name = "all" if (least, end) == (0, float("inf")) else f"from {least}"
        right = f"{100 * share:.0f} ({100 * low:.0f}-{100 * high:.0f})"
        lines.append([name, str(len(found)), right, f"{100 * sure:.0f}"])
    head = ("distance, tokens", "answers", "exact, %", f"probability of at least {LIKELY:.0%}")
    rows = results["settings"]
    note = f"{len(results['rows'])} rows of {rows['length']:,} tokens, with intervals of 95 %. {measured_at(results)}."
    return f"{markdown_table(head, lines, figures=True)}\n\n{note}"


class Settings(Options):
    teacher: Annotated[Path, typer.Option(help="folder of the teacher")]
    data: Annotated[Path, typer.Option(help="folder of the token files of corpus.py")]
    length: Annotated[int, typer.Option(help="tokens of a row")] = 2048
    rows: Annotated[int, typer.Option(help="rows to read")] = 24


def about(args) -> dict:
    return {"model": measuring.model_record(args.teacher), "text": text_record(args.data / "train.npy")}


main = Experiment("drill_teacher", __file__, Settings, rows_to_run, about=about).command()

if __name__ == "__main__":
    typer.run(main)
