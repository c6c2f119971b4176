"""Helpers for the plots of all experiments, and the plot of language models by context."""

import textwrap
from pathlib import Path

from hf_memmix.training.experiments.common.harness import measured_at
from hf_memmix.training.experiments.common.rates import chosen_rows, trained_and_failed

CAPTION_WIDTH = 76  # letters per panel
MARKERS = "osD^vP*Xh<>dpH8"
# how the variant of a model with this ending of its name looks, beside marker and colour of the model
VARIANTS = {
    "-small": {"markerfacecolor": "white"},
    "-vconv": {"fillstyle": "left"},
}


def pyplot_without_screen():
    """matplotlib's pyplot with a backend that needs no display and draws into files."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def figure_of(panels: int, caption: str):
    """A figure with `panels` panels in one row and a caption below them. Returns the figure and its panels."""
    figure, axes = pyplot_without_screen().subplots(
        1, panels, figsize=(5.2 * panels, 4), constrained_layout=True, squeeze=False
    )
    for panel in axes[0]:
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    figure.supxlabel(textwrap.fill(caption, CAPTION_WIDTH * panels), fontsize=8, color="#555555")
    return figure, axes[0]


def save(figure, path: str | Path, dpi: int = 150) -> None:
    """Write a figure as a PNG and close it.

    The file contains neither the time nor a version number, so equal figures give equal files.
    """
    from matplotlib import pyplot

    figure.savefig(path, dpi=dpi, metadata={"Software": None})
    pyplot.close(figure)


def sized_figure(panels: int, results: dict, seeds: str = "error bars: lowest to highest seed"):
    """`figure_of` with a caption that states size of the models, hardware, commits, and what shows the seeds."""
    settings = results["settings"]
    size = f"{settings['layers']} layers of {settings['hidden_size']}, {settings['tokens'] / 1e6:.0f}M tokens"
    return figure_of(panels, f"{size}; {measured_at(results)}; {seeds}")


def bars(panel, points: list[tuple[float, list[float]]], label: str, style: dict, across: bool = False) -> None:
    """Draw the mean of each point's values with an error bar from the smallest to the largest value.

    across: draw the values along the x axis.
    """
    if not points:
        return
    at, values = zip(*points, strict=True)
    means = [sum(v) / len(v) for v in values]
    spread = [[m - min(v) for m, v in zip(means, values, strict=True)]]
    spread.append([max(v) - m for m, v in zip(means, values, strict=True)])
    where = {"x": means, "y": at, "xerr": spread} if across else {"x": at, "y": means, "yerr": spread}
    panel.errorbar(**where, **style, label=label, capsize=3, linestyle="" if across else "-")


def styles_of(rows: list[dict]) -> dict[str, dict]:
    """Marker and colour of each model, the same in all panels. A variant (`VARIANTS`) has those of its model."""
    models = dict.fromkeys(row["model"] for row in rows)
    endings = {name: next((ending for ending in VARIANTS if name.endswith(ending)), "") for name in models}
    bases = {name: name.removesuffix(ending) for name, ending in endings.items()}
    places = {base: i for i, base in enumerate(dict.fromkeys(bases.values()))}
    return {
        name: {"marker": MARKERS[places[base] % len(MARKERS)], "color": f"C{places[base]}"}
        | VARIANTS.get(endings[name], {})
        for name, base in bases.items()
    }


def log_scale(axis) -> None:
    """Give the axis a log scale whose labels are plain numbers, not powers."""
    from matplotlib.ticker import MaxNLocator, NullLocator, ScalarFormatter

    axis.axes.set(**{f"{axis.axis_name}scale": "log"})
    axis.set_major_locator(MaxNLocator(7))
    axis.set_major_formatter(ScalarFormatter())
    axis.set_minor_locator(NullLocator())


def list_failed_rows(panel, failed: list[dict], keys: tuple[str, ...]) -> None:
    """Write below the panel which rows it does not show because they diverged or learnt nothing."""
    names = dict.fromkeys(" ".join(str(row[key]) for key in (*keys, "lr")) for row in failed)
    if names:
        panel.set_xlabel(
            f"{panel.get_xlabel()}\ndiverged or learnt nothing, not shown: {', '.join(names)}", fontsize=7
        )


def plot_language(results: dict, path: str | Path) -> None:
    """Plot held-out perplexity against context; a second panel shows the paper's figures if the rows hold them."""
    rows, failed = trained_and_failed(results)
    key = "paper_perplexity_on_books"
    figure, panels = sized_figure(1 + any(key in row for row in rows), results)
    ours = panels[0]
    for name, style in styles_of(rows).items():
        found = {c: chosen_rows(rows, model=name, context=c) for c in results["settings"]["contexts"]}
        found = {context: rows for context, rows in found.items() if rows}
        bars(ours, [(c, [row["perplexity"] for row in rows]) for c, rows in found.items()], name, style)
        for paper in panels[1:]:
            bars(paper, [(c, [rows[0][key]]) for c, rows in found.items() if key in rows[0]], name, style)
    for panel, title in zip(panels, ("held-out perplexity", "Books perplexity at 110M (paper)"), strict=False):
        panel.set_title(title, fontsize=11)
        panel.set_xscale("log", base=2)
        panel.set_xlabel("context, tokens")
        panel.set_xticks(results["settings"]["contexts"], results["settings"]["contexts"])
        log_scale(panel.yaxis)
    list_failed_rows(ours, failed, ("model", "context"))
    figure.legend(*ours.get_legend_handles_labels(), loc="outside right center", frameon=False, fontsize=8)
    save(figure, path)
