"""The plot of the README and of `make demo`: cache memory and time per token against context, from a results JSON.

python -m hf_memmix.training.evaluation.context_cost_plot RESULTS.json PLOT.png
"""

import json
from pathlib import Path

import typer

from hf_memmix.training.evaluation.picture import new_picture, write_picture

SERIES = {"teacher": ("#b5485d", "o", "KV cache"), "student": ("#2f6fa7", "s", "fixed state")}


def plot_context_cost(results: dict, path: str | Path) -> None:
    """Draw `results["context_cost"]`, `{"teacher": rows, "student": rows}` of `context_cost`, as a PNG."""
    from matplotlib import ticker

    figure, (memory, speed) = new_picture(1, 2, figsize=(10, 3.6))
    for role, rows in results["context_cost"].items():
        color, marker, kind = SERIES[role]
        label = f"{results[role]['name']} ({kind})"
        contexts = [row["context"] for row in rows]
        memory.plot(contexts, [row["cache_bytes"] / 2**20 for row in rows], color=color, marker=marker, label=label)
        speed.plot(contexts, [row["ms_per_token"] for row in rows], color=color, marker=marker, label=label)
    ticks = sorted({row["context"] for rows in results["context_cost"].values() for row in rows})
    for axes, title in ((memory, "cache memory of one sequence, MiB"), (speed, "decode, ms per token")):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(ticks, [f"{tick // 1024}k" if tick >= 1024 else str(tick) for tick in ticks])
        axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5) if axes is speed else (1,)))
        axes.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(ticker.NullFormatter())
        axes.set_xlabel("context, tokens")
        axes.set_title(title, fontsize=11)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    memory.legend(frameon=False, fontsize=9)
    figure.supxlabel(results["hardware"], fontsize=8, color="#555555")
    write_picture(figure, path, dpi=150)


def main(results: Path, plot: Path) -> None:
    """Draw the plot of a results.json of the demo."""
    plot_context_cost(json.loads(results.read_text(encoding="utf-8")), plot)


if __name__ == "__main__":
    typer.run(main)
