"""The table and the plot of `solvers.py`."""

from pathlib import Path

from hf_memmix.conversion.records import markdown_table
from hf_memmix.training.experiments.common.harness import measured_at
from hf_memmix.training.experiments.common.plots import MARKERS, figure_of, save

SHOWN = (10, 20, 30)  # iterations in the table
TITLES = {
    "forward": "(a) largest residual",
    "rounded": "largest residual in bf16",
    "layer": "(b, d) gradients of q, k: one layer",
    "network": "(c, e) gradients of weights: network",
    "ridge": "residual of CH by ridge",
}


def name_of(row: dict) -> str:
    """The solver, and how its gradient is computed, or the ridge."""
    if row["panel"] == "ridge":
        return f"lambda = {row['ridge']:g}" + ("" if row["constant"] else " x norm of H")
    return row["solver"] + (f", {row['way']}" if "way" in row else "")


def points_of(row: dict, settings: dict) -> list[tuple[int, float]]:
    """Pairs of a number of iterations and the error after it."""
    if "residuals" in row:
        return list(enumerate(row["residuals"], 1))
    return list(zip(settings["iterations"], row["differences"], strict=True))


def section(results: dict) -> str:
    """The errors after `SHOWN` iterations, one line per row, with a caption."""
    own, lines = results["settings"], []
    rows = [row for panel in TITLES for row in results["rows"] if row["panel"] == panel and "error" not in row]
    for row in rows:
        errors = dict(points_of(row, own))
        ridge = [f"{row['true_residual']:.2f}", f"{row['condition']:.0f}"] if row["panel"] == "ridge" else ["", ""]
        cells = [f"{errors[count]:.1e}" if count in errors else "" for count in SHOWN]
        lines.append([TITLES[row["panel"]], name_of(row), *cells, *ridge])
    head = ["panel", "solver", *(f"{count} iterations" for count in SHOWN), "mean of H x - q", "condition"]
    floors = {row["panel"]: row["exact_in_float32"] for row in results["rows"] if "exact_in_float32" in row}
    floor = ", ".join(f"{value:.1e} ({panel})" for panel, value in floors.items())
    sizes = (
        f"{own['heads']} heads of {own['head_dim']}; residuals: {own['problems']} tokens; gradients: {own['length']}"
    )
    return (
        f"{markdown_table(head, lines)}\n\n{sizes} tokens, {own['layers']} layers in the network. Solvers in float32"
        f" if not said, reference in float64; the exact solver in float32 is off by {floor}. {measured_at(results)}."
    )


def plot(results: dict, path: str | Path) -> None:
    """One panel per kind of row: the error by the number of iterations."""
    figure, panels = figure_of(len(TITLES), measured_at(results))
    for panel, (kind, title) in zip(panels, TITLES.items(), strict=True):
        for place, row in enumerate(row for row in results["rows"] if row["panel"] == kind and "error" not in row):
            points = [(count, error) for count, error in points_of(row, results["settings"]) if error < float("inf")]
            marker = MARKERS[place] if "differences" in row else None
            panel.plot(*zip(*points, strict=True), marker=marker, ms=4, label=name_of(row))
        panel.set(yscale="log", xlabel="iterations")
        panel.set_title(title, fontsize=11)
        panel.legend(frameon=False, fontsize=8)
    save(figure, path)
