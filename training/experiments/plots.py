"""Plots of the experiments' JSON files.

python -m hf_memmix.training.experiments.plots RESULTS.json PLOT.png
"""

import json
import math
import sys
from pathlib import Path

from hf_memmix.training.experiments.fit import best
from hf_memmix.training.experiments.harness import measured_at
from hf_memmix.training.experiments.lattice_ablation import LADDER, OPEN

MARKERS = "osD^vP*Xh<>"
FEWEST = 1e-4  # wrong answers that a log scale shows


def figure_of(panels: int, caption: str):
    """A figure with so many panels beside each other and a caption below, and its panels."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, panels, figsize=(5.2 * panels, 4), constrained_layout=True, squeeze=False)
    for panel in axes[0]:
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    figure.supxlabel(caption, fontsize=8, color="#555555")
    return figure, axes[0]


def save(figure, path: str | Path) -> None:
    from matplotlib import pyplot

    # no timestamp or version inside: the same numbers give the same file
    figure.savefig(path, dpi=150, metadata={"Software": None})
    pyplot.close(figure)


def _figure(panels: int, results: dict):
    settings = results["settings"]
    size = f"{settings['layers']} layers of {settings['hidden_size']}, {settings['tokens'] / 1e6:.0f}M tokens"
    return figure_of(panels, f"{size}; {measured_at(results)}")


def chosen_rows(rows: list[dict], **wanted) -> list[dict]:
    """For each seed the row with these values at the rate that was chosen, which is that of seed 0."""
    first = best(rows, **wanted, seed=0)
    if first is None:
        return []
    others = (best(rows, **wanted, seed=seed, lr=first["lr"]) for seed in sorted({row["seed"] for row in rows} - {0}))
    return [first, *(row for row in others if row is not None)]


def diverged(results: dict) -> tuple[list[dict], list[dict]]:
    """Finished rows that learnt something, and those that did not: not finite, or no better than chance.

    They are in the order of the models or rungs as the experiment lists them, whenever they were finished.
    """
    names = results["settings"].get("models", [*LADDER, *OPEN])
    rows = [row for row in results["rows"] if "finite" in row]
    rows.sort(key=lambda row: names.index(row.get("model") or row["rung"]))
    limit = results.get("chance_loss", math.inf)
    kept = [row for row in rows if row["finite"] and row["dev_loss"] < limit]
    return kept, [row for row in rows if row not in kept]


def _bars(panel, points: list[tuple[float, list[float]]], label: str, style: dict, across: bool = False) -> None:
    """The mean of each point's values, with a line from the least to the largest."""
    if not points:
        return
    at, values = zip(*points, strict=True)
    means = [sum(v) / len(v) for v in values]
    spread = [[m - min(v) for m, v in zip(means, values, strict=True)]]
    spread.append([max(v) - m for m, v in zip(means, values, strict=True)])
    where = {"x": means, "y": at, "xerr": spread} if across else {"x": at, "y": means, "yerr": spread}
    panel.errorbar(**where, **style, label=label, capsize=3, linestyle="" if across else "-")


def _styles(rows: list[dict]) -> dict[str, dict]:
    """Marker and colour of each model, the same in all panels; a "-small" one is its model with open markers."""
    names = dict.fromkeys(row["model"].removesuffix("-small") for row in rows)
    styles = {
        name: {"marker": mark, "color": f"C{i}"} for i, (name, mark) in enumerate(zip(names, MARKERS, strict=False))
    }
    small = [name for name in dict.fromkeys(row["model"] for row in rows) if name not in styles]
    return styles | {name: {**styles[name.removesuffix("-small")], "markerfacecolor": "white"} for name in small}


def _log(axis) -> None:
    """A log scale with plain numbers."""
    from matplotlib.ticker import MaxNLocator, NullLocator, ScalarFormatter

    axis.axes.set(**{f"{axis.axis_name}scale": "log"})
    axis.set_major_locator(MaxNLocator(7))
    axis.set_major_formatter(ScalarFormatter())
    axis.set_minor_locator(NullLocator())


def _name(panel, lost: list[dict], keys: tuple[str, ...]) -> None:
    """Say which rows are missing because they diverged."""
    names = dict.fromkeys(" ".join(str(row[key]) for key in (*keys, "lr")) for row in lost)
    if names:
        panel.set_xlabel(f"{panel.get_xlabel()}\ndiverged, not shown: {', '.join(names)}", fontsize=7)


def plot_language(results: dict, path: str | Path) -> None:
    """Held-out perplexity against context, ours and the paper's, if it has such."""
    rows, lost = diverged(results)
    key = "paper_perplexity_on_books"
    figure, panels = _figure(1 + any(key in row for row in rows), results)
    ours = panels[0]
    for name, style in _styles(rows).items():
        found = {c: chosen_rows(rows, model=name, context=c) for c in results["settings"]["contexts"]}
        found = {context: rows for context, rows in found.items() if rows}
        _bars(ours, [(c, [row["perplexity"] for row in rows]) for c, rows in found.items()], name, style)
        for paper in panels[1:]:
            _bars(paper, [(c, [rows[0][key]]) for c, rows in found.items() if key in rows[0]], name, style)
    for panel, title in zip(panels, ("held-out perplexity", "Books perplexity at 110M (paper)"), strict=False):
        panel.set_title(title, fontsize=11)
        panel.set_xscale("log", base=2)
        panel.set_xlabel("context, tokens")
        panel.set_xticks(results["settings"]["contexts"], results["settings"]["contexts"])
        _log(panel.yaxis)
    _name(ours, lost, ("model", "context"))
    figure.legend(*ours.get_legend_handles_labels(), loc="outside right center", frameon=False, fontsize=8)
    save(figure, path)


def plot_ablation(results: dict, path: str | Path) -> None:
    """Held-out perplexity of each rung of `lattice_ablation`, from the least to the largest of its seeds."""
    figure, (panel,) = _figure(1, results)
    rows, lost = diverged(results)
    names = list(dict.fromkeys(row["rung"] for row in rows))[::-1]
    found = [(i, chosen_rows(rows, rung=name)) for i, name in enumerate(names)]
    _bars(
        panel,
        [(i, [row["perplexity"] for row in rows]) for i, rows in found if rows],
        "",
        {"marker": "o"},
        across=True,
    )
    panel.set_yticks(range(len(names)), names, fontsize=8)
    panel.set_title("held-out perplexity", fontsize=11)
    _log(panel.xaxis)
    _name(panel, lost, ("rung",))
    save(figure, path)


def plot_recall(results: dict, path: str | Path) -> None:
    """Errors of each model of `recall` in each cell, at the learning rate chosen on dev sequences."""
    figure, (panel,) = _figure(1, results)
    rows, lost = diverged(results)
    cells = list(dict.fromkeys((row["length"], row["pairs"]) for row in rows))
    for name, style in _styles(rows).items():
        points = []
        for i, (length, pairs) in enumerate(cells):
            chosen = chosen_rows(rows, model=name, length=length, pairs=pairs)
            points += [(i, [max(1 - row["accuracy"], FEWEST) for row in chosen])] if chosen else []
        _bars(panel, points, name, style)
    panel.set_xticks(range(len(cells)), [f"{length}, {pairs} pairs" for length, pairs in cells])
    panel.set_yscale("log")
    panel.set_title("share of wrong answers", fontsize=11)
    _name(panel, lost, ("model", "length", "pairs"))
    panel.legend(frameon=False, fontsize=8)
    save(figure, path)


PLOTS = {
    "lattice_language": plot_language,
    "coffee_language": plot_language,
    "lattice_ablation": plot_ablation,
    "recall": plot_recall,
}


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    results = json.loads(Path(sys.argv[1]).read_text())
    PLOTS[results["experiment"]](results, sys.argv[2])
