"""The table and the plot of `mixtures.py`: quality of each layout against its state bytes."""

import statistics
from pathlib import Path

from hf_memmix.conversion.records import bytes_text, markdown_table
from hf_memmix.training.experiments.common.averages import SPREAD_NOTE
from hf_memmix.training.experiments.common.harness import measured_at
from hf_memmix.training.experiments.common.plots import MARKERS, figure_of, save
from hf_memmix.training.experiments.common.report import mean_of_rows

HEAD = (
    "layout",
    "layers",
    "state",
    "perplexity ratio",
    "KL",
    "same token",
    "nll of second mentions above the teacher",
)
SHORT = {"gka": "G", "lattice": "L", "mamba2": "M", "coffee": "C", "ska": "S", "attention": "A"}


def by_layout(results: dict) -> dict[str, list[dict]]:
    """The finished rows of each layout, the layout with the lowest mean KL on the held-out text first."""
    rows: dict[str, list[dict]] = {}
    for row in results["rows"]:
        if row.get("finite"):
            rise = row["answers_nll"] - row["answers_nll_teacher"]
            rows.setdefault(row["layout"], []).append(row | {"rise": rise})
    return dict(sorted(rows.items(), key=lambda item: statistics.fmean(row["heldout_kl"] for row in item[1])))


def letters(rows: list[dict]) -> str:
    """The layers of each seed by the mixers' initials, once if all seeds have the same."""
    return ", ".join(dict.fromkeys("".join(SHORT.get(kind, kind[0]) for kind in row["types"]) for row in rows))


def table(results: dict) -> str:
    """A table of means over seeds."""
    lines = []
    for name, rows in by_layout(results).items():
        sizes = ", ".join(dict.fromkeys(bytes_text(row["state_bytes"]) for row in rows))
        figures = [mean_of_rows(rows, key, digits) for key, digits in (("heldout_ppl_ratio", 3), ("heldout_kl", 4))]
        agreement, rise = mean_of_rows(rows, "heldout_top1_agreement", 1, 100), mean_of_rows(rows, "rise", 3)
        lines.append([name, letters(rows), sizes, *figures, f"{agreement} %", rise])
    failed = [row for row in results["rows"] if row.get("stage") == "distill" and not row.get("finite")]
    notes = [f"{row['layout']}, seed {row['seed']}: {row.get('diverged') or row.get('error')}" for row in failed]
    return "\n\n".join([markdown_table(HEAD, lines), *notes])


def section(results: dict) -> str:
    """The table, and below it the training budget, the hardware and the commits."""
    own = results["settings"]
    initials = ", ".join(f"{letter} {kind}" for kind, letter in SHORT.items() if kind in own["mixers"])
    steps = f"{own['align_steps']} steps of align and {own['distill_steps']} of distill"
    per_step = own["batch_size"] * own["block_size"]
    seeds = len({row["seed"] for row in results["rows"] if row.get("finite")})
    return (
        f"{table(results)}\n\n{initials}. {steps}, {per_step} tokens each; seeds: {seeds}. {SPREAD_NOTE}"
        f" {measured_at(results)}."
    )


def plot(results: dict, path: str | Path) -> None:
    """Plot KL and perplexity ratio of each layout against its state bytes."""
    figure, panels = figure_of(2, measured_at(results))
    layouts = by_layout(results)
    panel_keys = (("heldout_kl", "KL to the teacher, nats per token"), ("heldout_ppl_ratio", "perplexity ratio"))
    for panel, (key, name) in zip(panels, panel_keys, strict=True):
        for place, (layout, rows) in enumerate(layouts.items()):
            sizes = [row["state_bytes"] / 1024 for row in rows]
            values = [row[key] for row in rows]
            color = f"C{place % 10}"
            panel.plot(sizes, values, MARKERS[place % len(MARKERS)], color=color, ms=6, label=layout, alpha=0.8)
        panel.set(xlabel="state of a sequence, KiB", ylabel=name, yscale="log")
    panels[-1].legend(fontsize=7, frameon=False)
    save(figure, path)
