"""The plot of associative recall."""

from pathlib import Path

from hf_memmix.training.experiments.common.averages import mean_and_deviation
from hf_memmix.training.experiments.common.plots import save, sized_figure
from hf_memmix.training.experiments.common.rates import chosen_rows
from hf_memmix.training.experiments.gka.report import cells_in, measured_rows


def plot_recall(results: dict, path: str | Path) -> None:
    """Plot the accuracy of each model at the rate chosen on development sequences: a panel for each cell.

    A bar is the mean over seeds, a dot a seed. The best model stands on top.
    """
    rows = measured_rows(results)
    cells = cells_in(rows)
    figure, panels = sized_figure(len(cells), results, "a dot: one seed")
    for panel, (length, pairs) in zip(panels, cells, strict=True):
        found = {
            name: [100 * row["accuracy"] for row in chosen_rows(rows, model=name, length=length, pairs=pairs)]
            for name in dict.fromkeys(row["model"] for row in rows)
        }
        means = {name: mean_and_deviation(values)[0] for name, values in found.items() if values}
        order = sorted(means, key=means.get)
        panel.barh(range(len(order)), [means[name] for name in order], color="#b9cfe4")
        dots = [(accuracy, place) for place, name in enumerate(order) for accuracy in found[name]]
        panel.plot(*zip(*dots, strict=True), "o", color="#1f4e79", markersize=4)
        panel.set_yticks(range(len(order)), order, fontsize=8)
        panel.set_xlim(-2, 102)
        panel.set_title(f"accuracy, %: {length} tokens, {pairs} pairs", fontsize=11)
    save(figure, path)
