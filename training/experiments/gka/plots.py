"""The plot of associative recall."""

from pathlib import Path

from hf_memmix.training.experiments.common.plots import bars, name_lost, save, sized_figure, styles_of
from hf_memmix.training.experiments.common.rates import chosen_rows, learnt_and_lost

FEWEST = 1e-4  # wrong answers that a log scale shows


def plot_recall(results: dict, path: str | Path) -> None:
    """Errors of each model of `recall` in each cell, at the learning rate chosen on dev sequences."""
    figure, (panel,) = sized_figure(1, results)
    rows, lost = learnt_and_lost(results)
    cells = list(dict.fromkeys((row["length"], row["pairs"]) for row in rows))
    for name, style in styles_of(rows).items():
        points = []
        for i, (length, pairs) in enumerate(cells):
            chosen = chosen_rows(rows, model=name, length=length, pairs=pairs)
            points += [(i, [max(1 - row["accuracy"], FEWEST) for row in chosen])] if chosen else []
        bars(panel, points, name, style)
    panel.set_xticks(range(len(cells)), [f"{length}, {pairs} pairs" for length, pairs in cells])
    panel.set_yscale("log")
    panel.set_title("share of wrong answers", fontsize=11)
    name_lost(panel, lost, ("model", "length", "pairs"))
    panel.legend(frameon=False, fontsize=8)
    save(figure, path)
