"""The plots of the Lattice experiments."""

from pathlib import Path

from hf_memmix.training.experiments.common.plots import (
    bars,
    list_failed_rows,
    log_scale,
    plot_language,
    save,
    sized_figure,
)
from hf_memmix.training.experiments.common.rates import chosen_rows, trained_and_failed
from hf_memmix.training.experiments.common.report import joined
from hf_memmix.training.experiments.lattice.variants import IN_PAPER, NOT_IN_PAPER


def plot_languages(files: list[dict], path: str | Path) -> None:
    """`plot_language` with the models of all files (`joined`)."""
    plot_language(joined(files[0], files[1:]), path)


def plot_ablation(results: dict, path: str | Path) -> None:
    """Plot the held-out perplexity of each variant of `ablation.py`: the mean, and an error bar over the seeds."""
    figure, (panel,) = sized_figure(1, results)
    rows, failed = trained_and_failed(results, [*IN_PAPER, *NOT_IN_PAPER])
    names = list(dict.fromkeys(row["rung"] for row in rows))[::-1]
    found = [(i, chosen_rows(rows, rung=name)) for i, name in enumerate(names)]
    bars(
        panel,
        [(i, [row["perplexity"] for row in rows]) for i, rows in found if rows],
        "",
        {"marker": "o"},
        across=True,
    )
    panel.set_yticks(range(len(names)), names, fontsize=8)
    panel.set_title("held-out perplexity", fontsize=11)
    log_scale(panel.xaxis)
    list_failed_rows(panel, failed, ("rung",))
    save(figure, path)
