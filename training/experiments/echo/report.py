"""The tables of the Echo experiments, with the paper's figures in brackets.

Accuracies are in percent: mean and standard deviation over seeds. The accuracy of a task is the mean over its cells.
The accuracy at a length is the mean over the cells of the two trained tasks at this length. SKA gets the true action
mask, also when it is measured, unless a table says otherwise: `mask_table` has it without the mask.
"""

import statistics
from collections.abc import Iterable

from hf_memmix.conversion.records import markdown_table
from hf_memmix.training.experiments.common.averages import SPREAD_NOTE, spread_text
from hf_memmix.training.experiments.common.harness import measured_at
from hf_memmix.training.experiments.common.rates import at_best_rate
from hf_memmix.training.experiments.common.report import spread_note
from hf_memmix.training.experiments.echo.suite import MODELS, TRAINED, memory_of

TASKS_PAPER = {
    "mqar": {"ssm": 55.1, "attention": 76.0, "ska": 82.2},
    "system_prompt": {"ssm": 64.2, "attention": 81.3, "ska": 85.3},
    "tool_trace": {"ssm": 56.5, "attention": 76.2, "ska": 80.5},
    "niah": {"ssm": 52.0, "attention": 81.1, "ska": 84.2},
    "multi_hop": {"ssm": 39.3, "attention": 71.1, "ska": 76.7},
    "common_word": {"ssm": 52.9, "attention": 68.2, "ska": 74.1},
}
# the line "Mean" of the paper's Table 3, as printed; the means of its own lines above are 53.3, 75.7 and 80.5
MEAN_PAPER = {"ssm": 54.4, "attention": 76.2, "ska": 81.1}
TITLES = {"ssm": "Mamba-2", "attention": "attention", "ska": "SKA, true mask"}
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
    """For each model, the measured rows of all seeds at its best learning rate."""
    found = {model: [row for row in at_best_rate(rows, model=model) if "cells" in row] for model in MODELS}
    return {model: rows for model, rows in found.items() if rows}


def mean_of(row: dict, tasks: Iterable[str], lengths: Iterable[int] = ()) -> float | None:
    """Mean accuracy in percent over the cells of a row with these tasks and lengths; None without such cells."""
    accuracies = [a for task, n, _, a in row["cells"] if task in tasks and (not lengths or n in lengths)]
    return 100 * statistics.fmean(accuracies) if accuracies else None


def by_variant(results: dict) -> dict[str, list[dict]]:
    """The measured rows of each variant."""
    found: dict[str, list[dict]] = {}
    for row in results["rows"]:
        if "cells" in row:
            found.setdefault(row["variant"], []).append(row)
    return found


def _figures(values: list[float | None], paper: float | None = None) -> str:
    text = spread_text(values, 1)
    return text + (f" ({paper})" if text and paper is not None else "")


def columns(rows: list[dict]) -> dict[tuple[str, float], list[dict]]:
    """The measured rows of each model at each learning rate, the rate with the lowest development loss first."""
    found = {}
    for model in chosen(rows):
        measured = [row for row in rows if row["model"] == model and "cells" in row]
        best = chosen(rows)[model][0]["lr"]
        for lr in sorted({row["lr"] for row in measured}, key=lambda lr: (lr != best, lr)):
            found[model, lr] = [row for row in measured if row["lr"] == lr]
    return found


def transfer_tables(results: dict) -> str:
    """The paper's Tables 3 (accuracy by task) and 2 (accuracy by length), with the figures measured here, at the
    learning rates that the development loss chooses.
    """
    found, lengths = chosen(results["rows"]), results["settings"]["lengths"]
    head = [f"{TITLES[model]}, {rows[0]['lr']:g}" for model, rows in found.items()]

    def line(name, figure, paper: dict) -> tuple:
        cells = (_figures([figure(row) for row in rows], paper.get(model)) for model, rows in found.items())
        return (name, *cells)

    tasks = [line(task, lambda row, task=task: mean_of(row, [task]), paper) for task, paper in TASKS_PAPER.items()]
    tasks.append(line("mean of tasks", _task_mean, MEAN_PAPER))
    by_length = [
        line(length, lambda row, n=length: mean_of(row, TRAINED, [n]), LENGTHS_PAPER.get(length, {}))
        for length in lengths
    ]
    table = markdown_table(("task, or tokens (paper)", *head), [*tasks, *by_length])
    return f"{table}\n\n{_sizes(found)}"


def _sizes(found: dict[str, list[dict]]) -> str:
    """A sentence with the parameters of each model and the memory of its inner layers."""
    parts = []
    for model, rows in found.items():
        floats = memory_of(model)
        memory = f"{floats:,} floats" if floats else "grows"
        parts.append(f"{TITLES[model]} {rows[0]['parameters'] / 1e6:.2f}M, {memory}")
    return f"Parameters, and memory of an inner layer: {'; '.join(parts)}."


# columns of `mask_table`: the variant of the ablation, and its title
WITHOUT_MASK = {
    "no action mask": "SKA, no mask",
    "no action mask, K = 1": "SKA, no mask, K = 1",
    "no action mask, last two layers": "SKA, no mask, last two layers",
}
WITH_MASK = {"K = 2, chunks of 8": "SKA, true mask"}


def mask_table(transfer: dict, ablation: dict) -> str:
    """Accuracy by length without and with the true action mask, beside Mamba-2 and attention at both learning rates.

    The models that get no mask come first: they read the same input.
    """
    lengths = [n for n in ablation["settings"]["lengths"] if n in transfer["settings"]["lengths"]]
    variants, rate = by_variant(ablation), ablation["settings"]["lr"]

    def of_variants(titles):
        return {f"{title}, {rate:g}": variants[name] for name, title in titles.items() if name in variants}

    baselines = {
        f"{TITLES[model]}, {lr:g}": rows for (model, lr), rows in columns(transfer["rows"]).items() if model != "ska"
    }
    shown = of_variants(WITHOUT_MASK) | baselines | of_variants(WITH_MASK)
    groups = {f"trained tasks, {n}": (TRAINED, [n]) for n in lengths}
    groups["other tasks, these lengths"] = (tuple(task for task in TASKS_PAPER if task not in TRAINED), lengths)
    lines = [
        (name, *(_figures([mean_of(row, *of) for row in rows]) for rows in shown.values()))
        for name, of in groups.items()
    ]
    lines.append(("seeds", *(len(rows) for rows in shown.values())))
    return (
        markdown_table(("accuracy in percent at tokens", *shown), lines)
        + f"\n\nThe number after a name is the learning rate. {measured_at(transfer)} and {measured_at(ablation)}."
        f" {SPREAD_NOTE}"
    )


def _task_mean(row: dict) -> float | None:
    """The mean over tasks of the mean accuracy per task; None if a task was not measured."""
    means = [mean_of(row, [task]) for task in TASKS_PAPER]
    return None if None in means else statistics.fmean(means)


def ablation_table(results: dict) -> str:
    """One line per variant: accuracy on trained tasks, also at the shortest and the longest length, and on others."""
    lengths = results["settings"]["lengths"]
    lengths = (lengths[0], lengths[-1])
    others = tuple(task for task in TASKS_PAPER if task not in TRAINED)
    lines = [
        (
            name,
            _figures([mean_of(r, TRAINED) for r in rows]),
            *(_figures([mean_of(r, TRAINED, [n]) for r in rows]) for n in lengths),
            _figures([mean_of(r, others) for r in rows]),
        )
        for name, rows in by_variant(results).items()
    ]
    head = ("SKA with", "trained tasks", *(f"at {n}" for n in lengths), "other tasks")
    return markdown_table(head, lines)


def recall_grid(results: dict) -> str:
    """One line per model, one column per number of pairs and gap: accuracy at the best learning rate."""
    rows = [row for row in results["rows"] if "accuracy" in row]
    cells = sorted({(row["gap"], row["pairs"]) for row in rows})
    figures = {
        (model, *cell): at_best_rate(rows, model=model, gap=cell[0], pairs=cell[1])
        for model in dict.fromkeys(row["model"] for row in rows)
        for cell in cells
    }
    lines = [
        [model, *(spread_text([100 * row["accuracy"] for row in figures[model, *cell]], 1) for cell in cells)]
        for model in dict.fromkeys(model for model, *_ in figures)
    ]
    head = ["accuracy, %", *(f"{pairs} pairs, gap {gap}" for gap, pairs in cells)]
    return f"{markdown_table(head, lines)}\n\n{spread_note(figures.values())} {measured_at(results)}."


def report(results: dict) -> str:
    """The tables of one experiment, the number of measurements that failed, the hardware and the commits."""
    table = transfer_tables if results["experiment"] == "echo_transfer" else ablation_table
    failed = sum(len(row.get("errors", ())) + ("error" in row) for row in results["rows"])
    text = table(results) + (f"\n\n{failed} measurements failed." if failed else "")
    rows = chosen(results["rows"]) if table is transfer_tables else by_variant(results)
    return f"{text}\n\n{results['settings']['steps']} steps; {measured_at(results)}. {spread_note(rows.values())}"
