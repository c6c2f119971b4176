"""Heat maps of the probes' JSON: length along, depth down, one panel per task and model.

python -m hf_memmix.training.evaluation.probes.plot RESULTS.json PLOT.png [--measure gain]
"""

import json
from pathlib import Path

import typer

from hf_memmix.training.evaluation.picture import new_picture, write_picture

GAIN_TOP = 3  # nats; more is as green


def plot_probes(results: dict, path: str | Path, measure: str = "choice") -> None:
    """Draw `run_probes`' results as a PNG: one row of panels per model, one column per task.

    measure: "choice", the share of right choices among the candidates, or of exactly predicted answers for a task
        without candidates; or "gain", the nats per answer token that the context adds.
    """
    settings, tasks = results["settings"], results["settings"]["tasks"]
    models = [name for name in results["summary"][0] if name not in ("task", "answers", "chance")]
    size = (2.1 * len(tasks) + 1, 1.9 * len(models) + 0.6)
    figure, axes = new_picture(len(models), len(tasks), figsize=size, squeeze=False)
    for column, task in enumerate(tasks):
        cells = [cell for cell in results["cells"] if cell["task"] == task]
        depths = sorted({cell["depth"] for cell in cells if cell["depth"] is not None}) or [None]
        summary = next(row for row in results["summary"] if row["task"] == task)
        shown = "exact" if measure == "choice" and summary["chance"] is None else measure
        unit, scale, top = ("nats", 1, GAIN_TOP) if measure == "gain" else ("%", 100, 100)
        for row, name in enumerate(models):
            grid = [[_value(cells, n, depth, name, shown) for n in settings["lengths"]] for depth in depths]
            panel = axes[row, column]
            image = panel.imshow(grid, vmin=0, vmax=top / scale, cmap="RdYlGn", aspect="auto")
            for y, line in enumerate(grid):
                for x, value in enumerate(line):
                    panel.text(x, y, _text(value, scale), ha="center", va="center", size=7)
            panel.set_xticks(range(len(settings["lengths"])), settings["lengths"], fontsize=7)
            panel.set_yticks(range(len(depths)), ["all" if d is None else f"{d:g}" for d in depths], fontsize=7)
            if row == 0:
                chance = f", chance {100 * summary['chance']:.0f}" if shown == "choice" else ""
                panel.set_title(f"{task}\n{shown}, {unit}{chance}", fontsize=8)
            if column == 0:
                panel.set_ylabel(f"{name}\ndepth", fontsize=8)
    figure.supxlabel("length, tokens", fontsize=8)
    figure.colorbar(image, ax=axes, shrink=0.6)
    write_picture(figure, path)


def _text(value: float, scale: int) -> str:
    if value != value:  # no figure in this cell
        return "-"
    return f"{scale * value:.0f}" if scale > 1 else f"{value:.1f}"


def _value(cells: list[dict], length: int, depth: float | None, model: str, measure: str) -> float:
    for cell in cells:
        if (cell["length"], cell["depth"]) == (length, depth) and cell[model] is not None:
            value = cell[model][measure]
            return float("nan") if value is None else value
    return float("nan")


def main(results: Path, plot: Path, measure: str = "choice") -> None:
    """Draw the plot of a probes.json of `memmix eval`; measure: choice or gain."""
    plot_probes(json.loads(results.read_text(encoding="utf-8")), plot, measure)


if __name__ == "__main__":
    typer.run(main)
