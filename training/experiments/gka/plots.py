"""The plot of associative recall."""

from pathlib import Path

from hf_memmix.training.experiments.common.plots import bars, list_failed_rows, save, sized_figure, styles_of
from hf_memmix.training.experiments.common.rates import chosen_rows, trained_and_failed

SMALLEST_ERROR = 1e-4  # a log scale cannot show 0


def plot_recall(results: dict, path: str | Path) -> None:
    """Plot the share of wrong answers of each model in each cell, at the rate chosen on development sequences."""
    figure, (panel,) = sized_figure(1, results)
    rows, failed = trained_and_failed(results)
    cells = list(dict.fromkeys((row["length"], row["pairs"]) for row in rows))
    for name, style in styles_of(rows).items():
        points = []
        for i, (length, pairs) in enumerate(cells):
            chosen = chosen_rows(rows, model=name, length=length, pairs=pairs)
            points += [(i, [max(1 - row["accuracy"], SMALLEST_ERROR) for row in chosen])] if chosen else []
        bars(panel, points, name, style)
    panel.set_xticks(range(len(cells)), [f"{length}, {pairs} pairs" for length, pairs in cells])
    panel.set_yscale("log")
    panel.set_title("share of wrong answers", fontsize=11)
    list_failed_rows(panel, failed, ("model", "length", "pairs"))
    panel.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    save(figure, path)
