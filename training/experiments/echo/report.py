"""The tables of the Echo experiments, with the paper's figures in brackets.

Accuracies are in percent: mean and standard deviation over seeds. The accuracy of a task is the mean over its cells.
The accuracy at a length is the mean over the cells of the two trained tasks at this length.
"""

import math
import statistics

from hf_memmix.conversion.records import markdown_table
from hf_memmix.training.experiments.common.harness import matches, measured_at
from hf_memmix.training.experiments.echo.suite import MODELS, TRAINED

TASKS_PAPER = {
    "mqar": {"ssm": 55.1, "attention": 76.0, "ska": 82.2},
    "system_prompt": {"ssm": 64.2, "attention": 81.3, "ska": 85.3},
    "tool_trace": {"ssm": 56.5, "attention": 76.2, "ska": 80.5},
    "niah": {"ssm": 52.0, "attention": 81.1, "ska": 84.2},
    "multi_hop": {"ssm": 39.3, "attention": 71.1, "ska": 76.7},
    "common_word": {"ssm": 52.9, "attention": 68.2, "ska": 74.1},
}
LENGTHS_PAPER = {
    length: dict(zip(MODELS, row, strict=True))
    for length, row in {
        64: (88.6, 88.5, 94.5),
        128: (82.1, 97.4, 89.4),
        256: (75.8, 92.9, 93.3),
        512: (66.9, 78.1, 95.6),
        1024: (37.3, 64.8, 86.4),
        2048: (2.0, 42.5, 81.2),
        4096: (2.0, 5.0, 65.1),
    }.items()
}


def at_best_rate(rows: list[dict], **wanted) -> list[dict]:
    """The trained rows with the wanted values, of all seeds, at the learning rate with the lowest mean development
    loss.

    The mean is over the seeds that every rate has finished. A rate is not chosen if one of its trainings diverged.
    """
    by_rate = {}
    for row in rows:
        if matches(row, wanted) and ("dev_loss" in row or row.get("finite") is False):
            by_rate.setdefault(row["lr"], {})[row["seed"]] = row
    if not by_rate:
        return []
    seeds = set.intersection(*map(set, by_rate.values())) or {min(min(found) for found in by_rate.values())}

    def loss(rate: float) -> float:
        losses = [row.get("dev_loss", math.inf) for seed, row in by_rate[rate].items() if seed in seeds]
        return statistics.fmean(losses) if losses else math.inf

    return list(by_rate[min(by_rate, key=loss)].values())


def chosen(rows: list[dict]) -> dict[str, list[dict]]:
    """For each model, the measured rows of all seeds at its best learning rate."""
    found = {model: [row for row in at_best_rate(rows, model=model) if "cells" in row] for model in MODELS}
    return {model: rows for model, rows in found.items() if rows}


def mean_of(row: dict, kind: str = "cells", tasks=tuple(TASKS_PAPER), length: int | None = None) -> float | None:
    """Mean accuracy in percent over the cells of a row with these tasks and this length; None without such cells."""
    tasks = (tasks,) if isinstance(tasks, str) else tasks
    accuracies = [a for task, n, _, a in row[kind] if task in tasks and length in (None, n)]
    return 100 * statistics.fmean(accuracies) if accuracies else None


def mean_and_spread(values: list[float | None]) -> tuple[float, float]:
    """Mean and standard deviation of the values that are not None.

    The deviation of one value is 0; without values the mean is NaN and the deviation 0.
    """
    values = [value for value in values if value is not None]
    mean = statistics.fmean(values) if values else math.nan
    return mean, statistics.stdev(values) if len(values) > 1 else 0.0


def _figures(values: list[float | None], paper: float | None = None) -> str:
    mean, spread = mean_and_spread(values)
    if math.isnan(mean):
        return ""
    text = f"{mean:.1f}" + (f" ± {spread:.1f}" if len(values) - values.count(None) > 1 else "")
    return text + (f" ({paper})" if paper is not None else "")


def transfer_tables(results: dict) -> str:
    """The paper's Tables 3 (accuracy by task) and 2 (accuracy by length), with the figures measured here."""
    models, lengths = chosen(results["rows"]), results["settings"]["lengths"]
    head = [
        f"{name}, {rows[0]['parameters'] / 1e6:.2f}M, rate {rows[0]['lr']:g}, {len(rows)} seeds"
        for name, rows in models.items()
    ]
    tasks = [
        (task, *(_figures([mean_of(r, tasks=task) for r in rows], paper[name]) for name, rows in models.items()))
        for task, paper in TASKS_PAPER.items()
    ]
    overall = [statistics.fmean(column[name] for column in TASKS_PAPER.values()) for name in models]
    tasks.append(
        (
            "mean of tasks",
            *(
                _figures([_task_mean(r) for r in rows], round(p, 1))
                for rows, p in zip(models.values(), overall, strict=True)
            ),
        )
    )
    by_length = [
        (
            length,
            *(
                _figures(
                    [mean_of(r, tasks=TRAINED, length=length) for r in rows], LENGTHS_PAPER.get(length, {}).get(name)
                )
                for name, rows in models.items()
            ),
        )
        for length in lengths
    ]
    refreshed = [
        (
            length,
            _figures([mean_of(r, "refreshed", TRAINED, length) for r in models.get("ska", []) if "refreshed" in r]),
        )
        for length in lengths
    ]
    tables = [
        "**Tasks** (paper)", markdown_table(("task", *head), tasks),
        "**Length, tokens** (paper)", markdown_table(("length", *head), by_length),
    ]  # fmt: skip
    if any(text for _, text in refreshed):
        tables += ["**SKA refreshed at every token**", markdown_table(("length", "ska"), refreshed)]
    return "\n\n".join(tables)


def _task_mean(row: dict) -> float | None:
    """The mean over tasks of the mean accuracy per task; None if a task was not measured."""
    means = [mean_of(row, tasks=task) for task in TASKS_PAPER]
    return None if None in means else statistics.fmean(means)


def ablation_table(results: dict) -> str:
    """One line per variant: accuracy on trained tasks, on other tasks, by length, and with `refresh_every=1`."""
    lengths, variants = results["settings"]["lengths"], {}
    for row in results["rows"]:
        if "cells" in row:
            variants.setdefault(row["variant"], []).append(row)
    others = tuple(task for task in TASKS_PAPER if task not in TRAINED)
    lines = [
        (
            name,
            len(rows),
            _figures([mean_of(r, tasks=TRAINED) for r in rows]),
            _figures([mean_of(r, tasks=others) for r in rows]),
            *(_figures([mean_of(r, tasks=TRAINED, length=n) for r in rows]) for n in lengths),
            _figures([mean_of(r, "refreshed", TRAINED) for r in rows if "refreshed" in r]),
        )
        for name, rows in variants.items()
    ]
    head = ("SKA with", "seeds", "trained tasks", "other tasks", *(f"at {n}" for n in lengths), "refreshed")
    return markdown_table(head, lines)


def grid_accuracies(results: dict, model: str, pairs: int, gap: int) -> list[float]:
    """The accuracies in percent of a model in a cell, of all seeds, at the rate with the lowest development loss."""
    rows = at_best_rate(results["rows"], model=model, pairs=pairs, gap=gap)
    return [100 * row["accuracy"] for row in rows if "accuracy" in row]


def grid_table(results: dict) -> str:
    """A table of the accuracy of every model in every cell."""
    models, cells = results["settings"]["models"], results["settings"]["cells"]
    lines = [
        (pairs, gap, *(_figures(grid_accuracies(results, name, pairs, gap)) for name in models))
        for pairs, gap in cells
    ]
    return markdown_table(("pairs", "gap", *models), lines)


REPORTS = {"echo_transfer": transfer_tables, "echo_ablation": ablation_table, "echo_mqar": grid_table}


def report(results: dict) -> str:
    """The tables of one experiment, the number of measurements that failed, the hardware and the commits."""
    text = REPORTS[results["experiment"]](results)
    failed = sum(len(row.get("errors", ())) + ("error" in row) for row in results["rows"])
    text += f"\n\n{failed} measurements failed." if failed else ""
    return f"{text}\n\n{results['settings']['steps']} steps; {measured_at(results)}."
