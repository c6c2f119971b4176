"""The plot of the Lattice ablation."""

from pathlib import Path

from hf_memmix.training.experiments.common.plots import bars, log_scale, name_lost, save, sized_figure
from hf_memmix.training.experiments.common.rates import chosen_rows, learnt_and_lost
from hf_memmix.training.experiments.lattice.rungs import LADDER, OPEN


def plot_ablation(results: dict, path: str | Path) -> None:
    """Held-out perplexity of each rung of `lattice_ablation`, from the least to the largest of its seeds."""
    figure, (panel,) = sized_figure(1, results)
    rows, lost = learnt_and_lost(results, [*LADDER, *OPEN])
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
    name_lost(panel, lost, ("rung",))
    save(figure, path)
