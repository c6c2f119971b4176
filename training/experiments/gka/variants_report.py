"""The table and the plot of `variants.py`: recall, perplexity and size of the state of every variant."""

from pathlib import Path

from hf_memmix.conversion.records import bytes_text, markdown_table
from hf_memmix.training.experiments.common.averages import SPREAD_NOTE
from hf_memmix.training.experiments.common.harness import measured_at
from hf_memmix.training.experiments.common.plots import bars, figure_of, save
from hf_memmix.training.experiments.common.report import mean_of_rows


def panels_of(results: dict) -> dict[str, list[dict]]:
    """The rows that learnt something, by the column of the table in which they stand."""
    panels: dict[str, list[dict]] = {}
    for row in results["rows"]:
        if row.get("finite"):
            recall = row["task"] == "recall"
            name = f"{row['length']} tokens, {row['pairs']} pairs" if recall else f"perplexity at {row['context']}"
            panels.setdefault(name, []).append(row)
    return panels


def figure_key(row: dict) -> tuple[str, int, float]:
    """The reported figure of a row, its digits and its factor."""
    return ("accuracy", 1, 100.0) if row["task"] == "recall" else ("perplexity", 2, 1.0)


def section(results: dict) -> str:
    """The table with its caption."""
    panels, own = panels_of(results), results["settings"]
    lines, head = [], ["variant", *(cell for name in panels for cell in (name, "state per layer"))]
    for variant in own["variants"]:
        line = [variant]
        for rows in panels.values():
            found = [row for row in rows if row["variant"] == variant]
            sizes = ", ".join(dict.fromkeys(bytes_text(row["state_bytes"]) for row in found))
            line += [mean_of_rows(found, *figure_key(found[0])) if found else "", sizes]
        if any(line[1:]):
            lines.append(line)
    failed = [row for row in results["rows"] if "error" in row or row.get("finite") is False]
    names = ", ".join(f"{row['variant']} ({row['task']}, seed {row['seed']})" for row in failed)
    return (
        f"{markdown_table(head, lines)}\n\nRecall: accuracy in percent, {own['recall_tokens'] / 1e6:.0f}M tokens."
        f" Text: {own['tokens'] / 1e6:.0f}M tokens. {SPREAD_NOTE} {measured_at(results)}."
        + (f" Failed: {names}." if names else "")
    )


def plot(results: dict, path: str | Path) -> None:
    """Plot the figure of every variant, one panel per task."""
    panels = panels_of(results)
    variants = [v for v in results["settings"]["variants"] if any(r["variant"] == v for r in results["rows"])]
    figure, axes = figure_of(len(panels), measured_at(results))
    for axis, (name, rows) in zip(axes, panels.items(), strict=True):
        key, _, scale = figure_key(rows[0])
        values = {v: [scale * row[key] for row in rows if row["variant"] == v] for v in variants}
        points = [(place, found) for place, found in enumerate(values.values()) if found]
        bars(axis, points, name, {"marker": "o", "color": "C0"}, across=True)
        axis.set_yticks(range(len(variants)), variants)
        axis.invert_yaxis()
        axis.set_title(name if key == "perplexity" else f"accuracy, %: {name}", fontsize=11)
    save(figure, path)
