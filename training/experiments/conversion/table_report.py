"""The table and the plot of `table.py`: each mixer with each number of kept attention layers."""

import statistics
from pathlib import Path

from hf_memmix.assets import asset_path
from hf_memmix.conversion.estimate import estimate, meta_teacher
from hf_memmix.conversion.records import bytes_text, markdown_table
from hf_memmix.training.experiments.common import baselines  # noqa: F401, registers "gla"
from hf_memmix.training.experiments.common.averages import SPREAD_NOTE, spread_text
from hf_memmix.training.experiments.common.harness import measured_at
from hf_memmix.training.experiments.common.plots import MARKERS, figure_of, save
from hf_memmix.training.experiments.common.rates import at_edge, lowest_dev_loss

TEACHER = "attention"
HEAD = ("mixer", "layers kept", "rates", "perplexity ratio", "KL", "top-1 recall", "gain", "training, s")


def chosen(results: dict, mixer: str, kept: float) -> list[dict]:
    """The rows of a mixer, of all seeds, at the learning rate that was chosen for it."""
    rows = results["rows"]
    first = lowest_dev_loss(rows, mixer=mixer, kept=0.0, seed=0)
    if first is None:
        return []
    found = [row for row in rows if row.get("finite") and (row["mixer"], row["kept"]) == (mixer, kept)]
    return [row for row in found if row["scale"] == first["scale"]]


def recall(rows: list[dict], key: str, digits: int) -> str:
    """The mean and deviation of one figure ("exact" or "gain") of every probe, as text."""
    parts = []
    for task, probe in rows[0]["probes"].items():
        if probe[key] is not None:
            parts.append(f"{task} {spread_text([row['probes'][task][key] for row in rows], digits)}")
    return ", ".join(parts)


def table(results: dict) -> str:
    """A table of means over seeds. Recall is the share of answers that are exact."""
    lines = []
    teacher = [row for row in results["rows"] if row["mixer"] == TEACHER and "error" not in row]
    if teacher:
        lines.append(
            ("the transformer", "all", "", "1.000", "0", recall(teacher, "exact", 3), recall(teacher, "gain", 2), "")
        )
    mixers = dict.fromkeys(row["mixer"] for row in results["rows"] if row["mixer"] != TEACHER)
    for kept in sorted({row["kept"] for row in results["rows"] if row["mixer"] != TEACHER}):
        for mixer in mixers:
            rows = chosen(results, mixer, kept)
            if rows:
                ratio, kl = (spread_text([row[f"heldout_{key}"] for row in rows], 3) for key in ("ppl_ratio", "kl"))
                tried = [row for row in results["rows"] if row["mixer"] == mixer and row["kept"] == 0.0]
                edge = " (edge)" if at_edge(tried, rows[0]["scale"], "scale") else ""
                seconds = f"{statistics.fmean(row['training_seconds'] for row in rows):.0f}"
                layers = f"{len(rows[0]['kept_layers'])} ({100 * kept:g} %)"
                figures = (ratio, kl, recall(rows, "exact", 3), recall(rows, "gain", 2), seconds)
                lines.append((mixer, layers, f"x {rows[0]['scale']:g}{edge}", *figures))
    return markdown_table(HEAD, lines)


def state_sizes(results: dict) -> str:
    """A sentence with the memory of one sequence in a student of each mixer that keeps no attention layer."""
    teacher, sizes = meta_teacher(asset_path("tiny_teacher")), []
    for mixer in dict.fromkeys(row["mixer"] for row in results["rows"] if row["mixer"] != TEACHER):
        (found,) = estimate(teacher, mixer, contexts=(1024,))["state"]
        sizes.append(f"{mixer} {bytes_text(found['student'])}")
    return f"State of one sequence without kept layers: {', '.join(sizes)}."


def section(results: dict) -> str:
    """The table, and below it the training budget, the size of the states, the hardware and the commits."""
    settings = results["settings"]
    tokens = max((row.get("trained_tokens", 0) for row in results["rows"]), default=0)
    return (
        f"{table(results)}\n\n{tokens / 1e6:.1f}M tokens per student, {settings['align_steps']} steps of align and "
        f"{settings['distill_steps']} of distill; {measured_at(results)}. {SPREAD_NOTE} KL: the forward KL divergence"
        " from the transformer's next-token distribution on held-out text, in nats. Rates: a factor on the rates of"
        " the recipes; (edge): the largest or smallest factor that was tried, so a better one may exist. "
        + state_sizes(results)
    )


def plot(results: dict, path: str | Path) -> None:
    """Plot the perplexity ratio and the gain of every probe against the share of kept layers."""
    teacher = [row for row in results["rows"] if row["mixer"] == TEACHER and "error" not in row]
    tasks = list(teacher[0]["probes"]) if teacher else []
    tokens = max((row.get("trained_tokens", 0) for row in results["rows"]), default=0)
    caption = f"{tokens / 1e6:.0f}M tokens per student; {measured_at(results)}"
    figure, panels = figure_of(1 + len(tasks), caption)
    mixers = dict.fromkeys(row["mixer"] for row in results["rows"] if row["mixer"] != TEACHER)
    for mixer, mark in zip(mixers, MARKERS, strict=False):
        points = [(kept, chosen(results, mixer, kept)) for kept in sorted({row["kept"] for row in results["rows"]})]
        points = [(kept, rows) for kept, rows in points if rows]
        for panel, task in zip(panels, [None, *tasks], strict=True):
            values = [
                statistics.fmean(r["heldout_ppl_ratio"] if task is None else r["probes"][task]["gain"] for r in rows)
                for _, rows in points
            ]
            panel.plot([100 * kept for kept, _ in points], values, marker=mark, label=mixer)
    for panel, task in zip(panels, [None, *tasks], strict=True):
        panel.set_title("held-out perplexity / transformer's" if task is None else f"{task}: gain, nats", fontsize=11)
        panel.set_xlabel("layers kept as attention, %")
        level = 1.0 if task is None else teacher[0]["probes"][task]["gain"]
        panel.axhline(level, color="#555555", linestyle=":", label="transformer")
    panels[0].legend(frameon=False, fontsize=8)
    save(figure, path)
