"""The table and the plot of `table.py`: each mixer with each number of kept attention layers."""

import statistics
from pathlib import Path

from hf_memmix.conversion.records import markdown_table
from hf_memmix.training.experiments.common.harness import measured_at
from hf_memmix.training.experiments.common.plots import MARKERS, figure_of, save
from hf_memmix.training.experiments.common.rates import lowest_dev_loss

TEACHER = "attention"
HEAD = ("mixer", "layers kept", "rates", "perplexity ratio", "top-1 recall", "gain", "training, s")


def chosen(results: dict, mixer: str, kept: float) -> list[dict]:
    """The rows of a mixer, of all seeds, at the learning rate that was chosen for it."""
    rows = results["rows"]
    first = lowest_dev_loss(rows, mixer=mixer, kept=0.0, seed=0)
    if first is None:
        return []
    found = [row for row in rows if row.get("finite") and (row["mixer"], row["kept"]) == (mixer, kept)]
    return [row for row in found if row["scale"] == first["scale"]]


def mean_and_range(values: list[float], digits: int) -> str:
    """The mean over seeds and the largest distance of a seed from it, as text."""
    mean = statistics.fmean(values)
    spread = max(abs(value - mean) for value in values)
    return f"{mean:.{digits}f}" + (f" ± {spread:.{digits}f}" if len(values) > 1 else "")


def recall(rows: list[dict], key: str, digits: int) -> str:
    """The mean and range of one figure ("exact" or "gain") of every probe, as text."""
    parts = []
    for task, probe in rows[0]["probes"].items():
        if probe[key] is not None:
            parts.append(f"{task} {mean_and_range([row['probes'][task][key] for row in rows], digits)}")
    return ", ".join(parts)


def table(results: dict) -> str:
    """A table of means over seeds. Recall is the share of answers that are exact."""
    lines = []
    teacher = [row for row in results["rows"] if row["mixer"] == TEACHER and "error" not in row]
    if teacher:
        lines.append(
            ("the transformer", "all", "", "1.000", recall(teacher, "exact", 3), recall(teacher, "gain", 2), "")
        )
    mixers = dict.fromkeys(row["mixer"] for row in results["rows"] if row["mixer"] != TEACHER)
    for kept in sorted({row["kept"] for row in results["rows"] if row["mixer"] != TEACHER}):
        for mixer in mixers:
            rows = chosen(results, mixer, kept)
            if rows:
                ratio = mean_and_range([row["heldout_ppl_ratio"] for row in rows], 3)
                seconds = f"{statistics.fmean(row['training_seconds'] for row in rows):.0f}"
                layers = f"{len(rows[0]['kept_layers'])} ({100 * kept:g} %)"
                figures = (ratio, recall(rows, "exact", 3), recall(rows, "gain", 2), seconds)
                lines.append((mixer, layers, f"x {rows[0]['scale']:g}", *figures))
    return markdown_table(HEAD, lines)


def section(results: dict) -> str:
    """The table, and below it the training budget, the hardware and the commits."""
    settings = results["settings"]
    tokens = max((row.get("trained_tokens", 0) for row in results["rows"]), default=0)
    return (
        f"{table(results)}\n\n{tokens / 1e6:.1f}M tokens a student, {settings['align_steps']} steps of align and "
        f"{settings['distill_steps']} of distill; {measured_at(results)}."
    )


def plot(results: dict, path: str | Path) -> None:
    """Plot the perplexity ratio and the gain of every probe against the share of kept layers."""
    teacher = [row for row in results["rows"] if row["mixer"] == TEACHER and "error" not in row]
    tasks = list(teacher[0]["probes"]) if teacher else []
    tokens = max((row.get("trained_tokens", 0) for row in results["rows"]), default=0)
    caption = f"{tokens / 1e6:.0f}M tokens a student; {measured_at(results)}"
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
