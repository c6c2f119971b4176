"""Plots of the experiments' JSON files.

python -m hf_memmix.training.experiments.plots RESULTS.json PLOT.png
"""

import json
import sys
from pathlib import Path

from hf_memmix.training.experiments.fit import best

MARKERS = "osD^vP*Xh<>"


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
    settings, where = results["settings"], results["environment"]
    size = f"{settings['layers']} layers of {settings['hidden_size']}, {settings['tokens'] / 1e6:.0f}M tokens"
    return figure_of(panels, f"{size}; {where['hardware']}, {where['commit']}")


def plot_language(results: dict, path: str | Path) -> None:
    """Held-out perplexity of `lattice_language` against context, ours and the paper's."""
    figure, (ours, paper) = _figure(2, results)
    for marker, name in zip(MARKERS, dict.fromkeys(row["model"] for row in results["rows"]), strict=False):
        rows = [best(results["rows"], model=name, context=c, seed=0) for c in results["settings"]["contexts"]]
        rows = [row for row in rows if row is not None]
        for panel, key in ((ours, "perplexity"), (paper, "paper_perplexity_on_books")):
            points = [(row["context"], row[key]) for row in rows if key in row]
            panel.plot(*zip(*points, strict=True), marker=marker, label=name) if points else None
    for panel, title in ((ours, "held-out perplexity"), (paper, "Books perplexity at 110M (paper)")):
        panel.set_title(title, fontsize=11)
        panel.set_xscale("log", base=2)
        panel.set_xlabel("context, tokens")
    ours.legend(frameon=False, fontsize=8)
    save(figure, path)


def plot_ablation(results: dict, path: str | Path) -> None:
    """Held-out perplexity of each rung of `lattice_ablation`, and of a second seed as a cross."""
    figure, (panel,) = _figure(1, results)
    names = list(dict.fromkeys(row["rung"] for row in results["rows"]))[::-1]
    for seed, style in ((0, "o"), (1, "x")):
        rows = [(best(results["rows"], rung=name, seed=seed), i) for i, name in enumerate(names)]
        points = [(row["perplexity"], i) for row, i in rows if row is not None]
        panel.plot(*zip(*points, strict=True), style, color="#2f6fa7", label=f"seed {seed}") if points else None
    panel.set_yticks(range(len(names)), names, fontsize=8)
    panel.set_title("held-out perplexity", fontsize=11)
    panel.legend(frameon=False, fontsize=8)
    save(figure, path)


def plot_recall(results: dict, path: str | Path) -> None:
    """Accuracy of each model of `recall` in each cell, at the learning rate with the highest."""
    figure, (panel,) = _figure(1, results)
    cells = list(dict.fromkeys((row["length"], row["pairs"]) for row in results["rows"]))
    for marker, name in zip(MARKERS, dict.fromkeys(row["model"] for row in results["rows"]), strict=False):
        points = []
        for i, (length, pairs) in enumerate(cells):
            rows = [r for r in results["rows"] if (r["model"], r["length"], r["pairs"]) == (name, length, pairs)]
            accuracies = [row["accuracy"] for row in rows if "accuracy" in row]
            points += [(i, max(accuracies))] if accuracies else []
        panel.plot(*zip(*points, strict=True), marker=marker, label=name) if points else None
    panel.set_xticks(range(len(cells)), [f"{length}, {pairs} pairs" for length, pairs in cells])
    panel.set_title("accuracy of recall", fontsize=11)
    panel.legend(frameon=False, fontsize=8)
    save(figure, path)


PLOTS = {"lattice_language": plot_language, "lattice_ablation": plot_ablation, "recall": plot_recall}


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    results = json.loads(Path(sys.argv[1]).read_text())
    PLOTS[results["experiment"]](results, sys.argv[2])
