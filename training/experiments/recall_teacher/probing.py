"""Recall by length and depth: needles, two hops, MQAR with a fixed number of pairs, and MQAR that fills the context.

An answer counts if every token of it is the likeliest one of the whole vocabulary. On a GPU the models run under bf16
autocast, as in training.
"""

import random
import statistics

from hf_memmix.training.evaluation.probes import Material, draw
from hf_memmix.training.evaluation.probes.grid import DEPTHS
from hf_memmix.training.evaluation.probes.material import Answer, Sample
from hf_memmix.training.evaluation.probes.score import score
from hf_memmix.training.evaluation.probes.tasks import sentence
from hf_memmix.training.experiments.common.fit import autocast

PAIRS = 32
# the task, its words and its name in tables. Words: see `texts.probe_materials`
PROBES = {
    "niah": ("niah", "new", "needle"),
    "variables": ("variables", "new", "two hops"),
    "mqar_32": ("mqar_32", "drills", f"MQAR, {PAIRS} pairs"),
    "mqar": ("mqar", "drills", "MQAR, full"),
    "mqar_32_new": ("mqar_32", "new", f"MQAR, {PAIRS} pairs, new words"),
    "mqar_32_unseen": ("mqar_32", "unseen", f"MQAR, {PAIRS} pairs, unseen words"),
}
GATE_LENGTH = 1024  # tokens, at which the teacher had to reach its gate
BATCH_TOKENS = 32768
ROWS_OF_MQAR = 4  # a sequence has at least 32 answers, so fewer sequences are needed


def pairs_then_queries(material: Material, length: int, draw: random.Random) -> Sample | None:
    """32 pairs, filler, and all keys again in another order, with their values; None if `length` is too short."""
    keys, values = draw.sample(material.keys, PAIRS), [draw.choice(material.values) for _ in range(PAIRS)]
    texts = [list(sentence(material, *pair)) for pair in zip(keys, values, strict=True)]
    gap = length - len(material.start) - 2 * sum(map(len, texts))
    if gap < 0:
        return None
    ids = [*material.start, *(t for text in texts for t in text), *material.window(gap, draw)]
    firsts, answers = tuple({value[1][0]: None for value in values}), []
    for i in draw.sample(range(PAIRS), PAIRS):
        ids += texts[i]
        answers.append(Answer(len(ids) - len(values[i][1]), len(ids), i / (PAIRS - 1), firsts))
    return Sample(ids, ids, answers)


def samples_of(task: str, material: Material, length: int, count: int, seed: int = 0) -> list[Sample]:
    """The sequences of a task at a length: `count` for each depth, or `ROWS_OF_MQAR * count` of MQAR."""
    if task == "mqar_32":
        source = random.Random(f"{seed} {task} {length}")
        made = [pairs_then_queries(material, length, source) for _ in range(ROWS_OF_MQAR * count)]
        return [sample for sample in made if sample is not None]
    if task == "mqar":
        return draw(task, material, length, None, seed, max(1, ROWS_OF_MQAR * count * PAIRS * 8 // length))
    return [sample for depth in DEPTHS for sample in draw(task, material, length, depth, seed, count)]


def drawn(materials: dict[str, Material], lengths, count: int, probes=tuple(PROBES), seed: int = 0) -> dict[str, dict]:
    """The sequences of each probe and length; a length that is too short for a probe is left out.

    materials: by the kind of their words, see `texts.probe_materials`.
    """
    found = {}
    for probe in probes:
        task, words, _ = PROBES[probe]
        found[probe] = {length: samples_of(task, materials[words], length, count, seed) for length in lengths}
    return {probe: {length: rows for length, rows in by.items() if rows} for probe, by in found.items()}


def recall_of(model, sequences: dict[str, dict]) -> list[dict]:
    """One row per task, length and depth: `{"task", "length", "depth", "answers", "exact", "choice", "nll"}`."""
    rows = []
    for task, by_length in sequences.items():
        for length, samples in by_length.items():
            with autocast():
                scores = score(model, samples, max(1, BATCH_TOKENS // length), control=False)
            by_depth: dict[float, list] = {}
            for one in scores:
                by_depth.setdefault(min(DEPTHS, key=lambda depth: abs(depth - one.answer.depth)), []).append(one)
            for depth, some in sorted(by_depth.items()):
                means = {name: statistics.fmean(getattr(s, name) for s in some) for name in ("exact", "choice", "nll")}
                rows.append({"task": task, "length": length, "depth": depth, "answers": len(some)} | means)
    return rows


def mean_recall(rows: list[dict], task: str, length: int, measure: str = "exact") -> float | None:
    """The mean over all answers of a task at a length; None if it was not measured."""
    some = [row for row in rows if (row["task"], row["length"]) == (task, length)]
    total = sum(row["answers"] for row in some)
    return sum(row["answers"] * row[measure] for row in some) / total if total else None
