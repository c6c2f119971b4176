"""Plots of the Echo experiments' JSON files. Crosses and dotted lines show the paper's figures."""

from pathlib import Path

from hf_memmix.training.experiments.common.averages import mean_and_deviation
from hf_memmix.training.experiments.common.harness import measured_at
from hf_memmix.training.experiments.common.plots import figure_of, save
from hf_memmix.training.experiments.common.rates import chosen_rows
from hf_memmix.training.experiments.echo.report import (
    LENGTHS_PAPER,
    TASKS_PAPER,
    answers_seen,
    at_best_rate,
    chosen,
    grid_accuracies,
    mean_of,
    steps_text,
    tiers_of,
)
from hf_memmix.training.experiments.echo.suite import TRAINED

COLORS = {
    "ssm": "#8a8a8a",
    "attention": "#c96f2f",
    "ska": "#2f6fa7",
    "ska-unmasked": "#7fb2d9",
    "ska-unmasked-k1": "#3f9b77",
}


def _figure(panels: int, results: dict):
    return figure_of(panels, f"{steps_text(results['settings'])}; {measured_at(results)}")


def plot_transfer(results: dict, path: str | Path) -> None:
    """Plot accuracy by task and by length, as means over seeds. Crosses and dotted lines are the paper's figures."""
    figure, (tasks, lengths) = _figure(2, results)
    for place, (model, rows) in enumerate(chosen(results["rows"]).items()):
        at = [i + 0.27 * (place - 1) for i in range(len(TASKS_PAPER))]
        found = [mean_and_deviation([mean_of(row, tasks=task) for row in rows]) for task in TASKS_PAPER]
        tasks.bar(at, [f[0] for f in found], 0.25, yerr=[f[1] for f in found], color=COLORS[model], label=model)
        tasks.plot(at, [TASKS_PAPER[task][model] for task in TASKS_PAPER], "kx", markersize=4)
        curve = [
            (n, mean_and_deviation([mean_of(row, tasks=TRAINED, length=n) for row in rows])[0])
            for n in results["settings"]["lengths"]
        ]
        lengths.plot(*zip(*curve, strict=True), marker="o", color=COLORS[model], label=model)
        paper = [(n, row[model]) for n, row in LENGTHS_PAPER.items()]
        lengths.plot(*zip(*paper, strict=True), ":", marker="x", color=COLORS[model])
    tasks.set_xticks(range(len(TASKS_PAPER)), list(TASKS_PAPER), rotation=20, fontsize=8)
    tasks.set_title("accuracy by task, % (crosses: paper)", fontsize=11)
    lengths.set_xscale("log", base=2)
    lengths.set_xticks(results["settings"]["lengths"], results["settings"]["lengths"])
    lengths.set_title("trained tasks by length, % (dotted: paper)", fontsize=11)
    lengths.legend(frameon=False, fontsize=8)
    save(figure, path)


def plot_ablation(results: dict, path: str | Path) -> None:
    """Plot the mean accuracy of each variant over all cells, and on the trained tasks with `refresh_every=1`."""
    figure, (panel,) = _figure(1, results)
    names = list(dict.fromkeys(row["variant"] for row in results["rows"] if "cells" in row))[::-1]
    for kind, style in (("cells", "o"), ("refreshed", "x")):
        points = [
            (mean_of(row, kind), names.index(row["variant"])) for row in results["rows"] if row.get(kind) is not None
        ]
        panel.plot(*zip(*points, strict=True), style, label=kind) if points else None
    panel.set_yticks(range(len(names)), names, fontsize=8)
    panel.set_title("mean accuracy, %", fontsize=11)
    panel.legend(frameon=False, fontsize=8)
    save(figure, path)


def plot_grid(results: dict, path: str | Path) -> None:
    """Plot the accuracy of each model in each cell of the recall grid; with several seeds, the loss of each seed."""
    if results["settings"]["seeds"] > 1:
        return plot_answers(results, path)
    figure, (panel,) = _figure(1, results)
    cells = [(pairs, gap) for pairs, gap, *_ in results["settings"]["cells"]]
    for model in results["settings"]["models"]:
        found = {i: grid_accuracies(results, model, *cell) for i, cell in enumerate(cells)}
        points = [(i, mean_and_deviation(accuracies)[0]) for i, accuracies in found.items() if accuracies]
        panel.plot(*zip(*points, strict=True), "o-", color=COLORS[model], label=model) if points else None
    panel.set_xticks(range(len(cells)), [f"{n} pairs,\ngap {gap}" for n, gap in cells], fontsize=7, rotation=45)
    panel.set_title("accuracy of recall, %", fontsize=11)
    panel.legend(frameon=False, fontsize=8)
    save(figure, path)


def plot_answers(results: dict, path: str | Path) -> None:
    """Plot the training loss by the answers seen, a panel per cell: each seed at the chosen rate is a line."""
    cells = [(pairs, gap) for pairs, gap, *_ in results["settings"]["cells"]]
    figure, panels = _figure(len(cells), results)
    for panel, (pairs, gap) in zip(panels, cells, strict=True):
        for model in results["settings"]["models"]:
            rows = at_best_rate(results["rows"], model=model, pairs=pairs, gap=gap)
            for number, row in enumerate(rows):
                seen = [answers_seen(results, row | {"steps": step}) / 1e6 for step, _ in row["curve"]]
                label = model if number == 0 else None
                losses = [loss for _, loss in row["curve"]]
                panel.plot(seen, losses, color=COLORS[model], alpha=0.8, linewidth=1.2, label=label)
        panel.set_title(f"{pairs} pairs, gap {gap}: training loss by million answers", fontsize=10)
        panel.set_yscale("log")
        panel.legend(frameon=False, fontsize=8)
    save(figure, path)


def plot_scratchpad(results: dict, path: str | Path) -> None:
    """Plot the accuracy of every model by training step, a panel per tier: each seed at the chosen rate is a line.

    Rows that did not record it (they are older) have their training loss instead. With three or more scales of SKA's
    output a last panel has the accuracy at the end by scale, the dose.
    """
    tiers = tiers_of(results)
    recorded = any("accuracies" in row for row in results["rows"])
    doses = {
        name: float(name.split()[-1])
        for name in results["settings"]["variants"]
        if recorded and "eta" in name and "mask" not in name
    }
    figure, panels = _figure(len(tiers) + (len(doses) > 2), results)
    for tier, panel in zip(tiers, panels, strict=False):
        for i, name in enumerate(results["settings"]["variants"]):
            rows = [row for row in results["rows"] if (row["tier"], row["variant"]) == (tier, name)]
            for number, row in enumerate(chosen_rows(rows, variant=name)):
                accuracies = [[step, 100 * accuracy] for step, accuracy in row.get("accuracies", ())]
                steps, values = zip(*(accuracies if recorded else row["curve"]), strict=True)
                label = name if number == 0 else None
                panel.plot(steps, values, color=f"C{i}", alpha=0.8, linewidth=1.2, label=label)
        panel.set_title(f"{tier}: {'accuracy in percent' if recorded else 'training loss'} by step", fontsize=11)
        panel.set(yscale="linear", ylim=(-3, 103)) if recorded else panel.set_yscale("log")
        panel.set_xlabel("step")
    panels[0].legend(frameon=False, fontsize=7)
    if len(doses) > 2:
        _plot_doses(panels[-1], results, tiers, doses)
    save(figure, path)


def _plot_doses(panel, results: dict, tiers: list[str], doses: dict[str, float]) -> None:
    """The accuracy at the end of the training by the scale of SKA's output at its start, a line per tier."""
    for tier in tiers:
        rows = [row for row in results["rows"] if row["tier"] == tier and "accuracy" in row]
        found = {eta: chosen_rows(rows, variant=name) for name, eta in sorted(doses.items(), key=lambda item: item[1])}
        points = [
            (eta, *mean_and_deviation([100 * row["accuracy"] for row in rows])) for eta, rows in found.items() if rows
        ]
        if points:
            etas, means, deviations = zip(*points, strict=True)
            panel.errorbar(etas, means, deviations, marker="o", capsize=3, label=tier)
    panel.set_xscale("log", base=2)
    panel.set_xticks(list(doses.values()), [f"{eta:g}" for eta in doses.values()])
    panel.set_title("accuracy at the end by scale eta, %", fontsize=11)
    panel.set_ylim(-3, 103)
    panel.legend(frameon=False, fontsize=8)
