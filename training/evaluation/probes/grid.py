"""Scores models on every task, length and depth; `memmix eval` writes the result as JSON."""

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace

from torch import nn

from hf_memmix.conversion.limits import limit_of
from hf_memmix.training.evaluation.free_generation import generated_answers
from hf_memmix.training.evaluation.probes.material import Material
from hf_memmix.training.evaluation.probes.score import Scores, score
from hf_memmix.training.evaluation.probes.tasks import DEPTHS, TASKS, check_grid, draw

LENGTHS = (128, 256, 512, 1024)


def run_probes(
    models: dict[str, nn.Module | Callable[[], nn.Module]],
    material: Material,
    *,
    tasks: tuple[str, ...] = tuple(TASKS),
    lengths: tuple[int, ...] = LENGTHS,
    depths: tuple[float, ...] = DEPTHS,
    samples: int = 16,
    seed: int = 0,
    batch_size: int = 8,
    control: bool = True,
    generate: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> dict:
    """Score every model on the same sequences.

    The sequences of one task and length are drawn anew for each model, and once before the first model runs, so that
    those of one cell only are in memory. Lengths that no model can read are left out, if all models are loaded.

    Args:
        models: by name, a model or a function that loads it. A loaded model leaves the memory before the next one.
        samples: sequences per cell. A task without depths draws this number of sequences per length.
        control: whether the controls are read. Without them, gains are None, and the probes take half of the time.
        generate: whether the models also generate the answers that are asked at the end (`Answer.asked`).

    Returns:
        `settings`, `cells` and `summary`. A cell has `{"task", "length", "depth", "answers", "chance"}` and, for every
        model, the `means` of its answers, or None if the length is over the model's limit. `summary` has the means
        over all cells of a task that every model can read. `chance` and `choice` are None without candidates.

    Raises:
        ValueError: a task is unknown, a task, length or depth is named twice, a depth is outside 0 to 1, a length is
            too short for a task, or the sequences of one task and length have more than `MAX_CELL_TOKENS` tokens.
    """
    limits = [limit_of(model) if isinstance(model, nn.Module) else math.inf for model in models.values()]
    readable = tuple(length for length in lengths if length <= max(limits, default=0))
    check_grid(tasks, lengths, depths, samples, readable)

    def cell(task: str, length: int, count: int) -> list:
        asked = depths if TASKS[task].depths else (None,)
        return [s for d in asked for s in draw(task, material, length, d, seed, count)]

    raw = {(task, length): {} for task in tasks for length in lengths}
    for task, length in raw:  # before a model runs, so that a length that is too short for a draw is refused at once
        if length in readable:
            cell(task, length, samples)
    done, total = 0, len(raw) * len(models)
    for name, model in models.items():
        model = model if isinstance(model, nn.Module) else model()
        for (task, length), scores in raw.items():
            if length <= limit_of(model):
                drawn = cell(task, length, samples)
                scores[name] = score(model, drawn, batch_size, control)
                if generate:
                    answers = generated_answers(model, drawn, material.tokenizer, batch_size)
                    scores[name] = [replace(s, generated=answers[s.sequence]) for s in scores[name]]
            done += 1
            if progress is not None:
                progress(done, total)
        del model
    cells = []
    for (task, length), results in raw.items():
        cells += _cells(task, length, depths, models, results)
    return {
        "settings": {
            "tasks": list(tasks), "lengths": list(lengths), "depths": list(depths), "samples": samples, "seed": seed,
            "chat": material.chat, "gain_error_over": "sequences",
        },
        "cells": cells,
        "summary": [_summary(task, models, [raw[task, length] for length in lengths]) for task in tasks],
    }  # fmt: skip


def means(scores: list[Scores], sequences: Sequence[Hashable] | None = None) -> dict:
    """Means of the fields of `Scores` over answers, and the standard error of the mean gain.

    The gain is the mean over the answers that have one; None if no answer has one. Its standard error is that of
    sequences: the answers of one sequence share a context and are not independent. None for less than two sequences.

    Args:
        sequences: the sequence of each answer; default: `Scores.sequence`.
    """
    choices = [s.choice for s in scores if s.choice is not None]
    generated = [s.generated for s in scores if s.generated is not None]
    count = max(1, len(scores))
    sequences = sequences or [s.sequence for s in scores]
    gains = [(s.gain, sequence) for s, sequence in zip(scores, sequences, strict=True) if s.gain is not None]
    gain = sum(g for g, _ in gains) / max(1, len(gains)) if gains or not scores else None
    return {
        "nll": sum(s.nll for s in scores) / count,
        "exact": sum(s.exact for s in scores) / count,
        "choice": sum(choices) / len(choices) if choices else None,
        "generated": sum(generated) / len(generated) if generated else None,
        "gain": gain,
        "gain_error": _error_of_mean(gains),
    }


def _error_of_mean(values: list[tuple[float, Hashable]]) -> float | None:
    """The standard error of the mean of values, each with the group it belongs to; groups are independent.

    That of a ratio of sums over groups, to first order; with one value per group that of a mean. None for less than
    two groups.
    """
    mean, off = sum(value for value, _ in values) / max(1, len(values)), {}
    for value, group in values:
        off[group] = off.get(group, 0.0) + value - mean
    groups = len(off)
    if groups < 2:
        return None
    return (groups / (groups - 1) * sum(total**2 for total in off.values())) ** 0.5 / len(values)


def by_length(results: dict) -> list[dict]:
    """The share of exact answers of every model by task and length, over all depths.

    results: of `run_probes`. A row is `{"task", "length", "answers"}` and, by the model's name, the share, or None if
    the length is over the model's limit. An answer is exact if each of its tokens is the likeliest one of the whole
    vocabulary.
    """
    rows: dict[tuple[str, int], list[dict]] = {}
    for cell in results["cells"]:
        rows.setdefault((cell["task"], cell["length"]), []).append(cell)
    fields = ("task", "length", "depth", "answers", "chance")
    table = []
    for (task, length), cells in rows.items():
        row = {"task": task, "length": length, "answers": sum(cell["answers"] for cell in cells)}
        for name in (name for name in cells[0] if name not in fields):
            read = all(cell[name] is not None for cell in cells)
            right = sum(cell["answers"] * cell[name]["exact"] for cell in cells) if read else None
            row[name] = right / row["answers"] if read else None
        table.append(row)
    return table


def _cells(task: str, length: int, depths, models, results: dict[str, list[Scores]]) -> list[dict]:
    """One row per depth, or one with depth None if the answers have no depth."""
    rows = []
    some = next(iter(results.values()), [])
    where = [_nearest(s.answer.depth, depths) for s in some]
    for depth in dict.fromkeys(sorted(where, key=lambda d: (d is not None, d))):
        chosen = [i for i, at in enumerate(where) if at == depth]
        row = {"task": task, "length": length, "depth": depth, "answers": len(chosen)}
        row["chance"] = _chance([some[i] for i in chosen])
        for name in models:
            row[name] = means([results[name][i] for i in chosen]) if name in results else None
        rows.append(row)
    return rows


def _nearest(depth: float | None, depths) -> float | None:
    return None if depth is None else min(depths, key=lambda d: abs(d - depth))


def _chance(scores: list[Scores]) -> float | None:
    sizes = [len(s.answer.candidates) for s in scores if s.answer.candidates]
    return sum(1 / size for size in sizes) / len(sizes) if sizes else None


def _summary(task: str, models, lengths: list[dict[str, list[Scores]]]) -> dict:
    shared = [results for results in lengths if len(results) == len(models)]
    joined = {
        name: [(s, (i, s.sequence)) for i, results in enumerate(shared) for s in results[name]] for name in models
    }
    some = [s for s, _ in next(iter(joined.values()))]
    row = {"task": task, "answers": len(some), "chance": _chance(some)}
    return row | {name: means(*map(list, zip(*of, strict=True))) if of else None for name, of in joined.items()}
