"""The Echo experiments' JSON files as Markdown tables: the paper's figures in brackets beside those measured here.

python -m hf_memmix.training.experiments.echo_report RESULTS.json [RESULTS.json ...]

Accuracies in percent, mean and standard deviation over seeds; a task's is the mean over its cells, a length's that
over the cells of the two trained tasks.
"""

import json
import statistics
import sys
from pathlib import Path

from hf_memmix.training.experiments.coffee_report import markdown
from hf_memmix.training.experiments.echo_suite import MODELS, TRAINED
from hf_memmix.training.experiments.fit import best

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


def chosen(rows: list[dict]) -> dict[str, list[dict]]:
    """For each model the finished rows of all seeds at its best learning rate."""
    found = {}
    for model in MODELS:
        if (row := best([row for row in rows if row["seed"] == 0], model=model)) is not None:
            same = [r for r in rows if (r["model"], r["lr"]) == (model, row["lr"])]
            found[model] = [r for r in same if "cells" in r]
    return found


def mean_of(row: dict, kind: str = "cells", tasks=tuple(TASKS_PAPER), length: int | None = None) -> float | None:
    """Mean accuracy in percent of a row's cells of the tasks, and of a length; None where there is no such cell."""
    tasks = (tasks,) if isinstance(tasks, str) else tasks
    accuracies = [a for task, n, _, a in row[kind] if task in tasks and length in (None, n)]
    return 100 * statistics.fmean(accuracies) if accuracies else None


def mean_and_spread(values: list[float]) -> tuple[float, float]:
    """Mean and standard deviation, 0 for one value."""
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def _figures(values: list[float | None], paper: float | None = None) -> str:
    values = [value for value in values if value is not None]
    if not values:
        return ""
    mean, spread = mean_and_spread(values)
    text = f"{mean:.1f}" + (f" ± {spread:.1f}" if len(values) > 1 else "")
    return text + (f" ({paper})" if paper is not None else "")


def transfer_tables(results: dict) -> str:
    """Tables 3 and 2."""
    models, lengths = chosen(results["rows"]), results["settings"]["lengths"]
    head = [f"{name}, {rows[0]['parameters'] / 1e6:.2f}M, {len(rows)} seeds" for name, rows in models.items()]
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
    return "\n\n".join(
        [
            "**Tasks** (paper)", markdown(("task", *head), tasks),
            "**Length, tokens** (paper)", markdown(("length", *head), by_length),
            "**SKA refreshed at every token**", markdown(("length", "ska"), refreshed),
        ]
    )  # fmt: skip


def _task_mean(row: dict) -> float:
    return statistics.fmean(mean_of(row, tasks=task) for task in TASKS_PAPER)


def ablation_table(results: dict) -> str:
    """One line a variant: trained tasks, the others, lengths, and the trained tasks refreshed at every token."""
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
    return markdown(head, lines)


def grid_table(results: dict) -> str:
    """Accuracy of every model in every cell, at the learning rate of lowest dev loss."""
    models, cells = results["settings"]["models"], results["settings"]["cells"]
    lines = []
    for pairs, gap in cells:
        found = [best(results["rows"], model=name, pairs=pairs, gap=gap) for name in models]
        lines.append((pairs, gap, *("" if row is None else f"{100 * row['accuracy']:.1f}" for row in found)))
    return markdown(("pairs", "gap", *models), lines)


REPORTS = {"echo_transfer": transfer_tables, "echo_ablation": ablation_table, "echo_mqar": grid_table}


def report(results: dict) -> str:
    where = results["environment"]
    text = REPORTS[results["experiment"]](results)
    return f"{text}\n\n{results['settings']['steps']} steps; {where['hardware']}, commit {where['commit']}.\n"


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    sys.stdout.write("\n".join(report(json.loads(Path(path).read_text())) for path in sys.argv[1:]))
