"""The table and the plot of the baselines' language models."""

from pathlib import Path

from hf_memmix.training.experiments.common.averages import mean_and_deviation
from hf_memmix.training.experiments.common.plots import bars, log_scale, save, sized_figure
from hf_memmix.training.experiments.common.rates import chosen_rows, trained_and_failed
from hf_memmix.training.experiments.common.report import language_section, memory_text

# colour of a model by the numbers of its memory per layer, compared with Lattice's
COLORS = {"as large as Lattice's": "C0", "larger": "C3", "smaller": "C2", "grows with the context": "#555555"}


def language(results: dict) -> str:
    """The table of language models with their distance from the transformer."""
    return language_section(results, "transformer", {})


def size_of_memory(settings: dict, model: str) -> str:
    """The key of `COLORS` of a model."""
    floats, lattice = (memory_text(settings, name)[0].replace(",", "") for name in (model, "dec"))
    if not floats.isdigit():
        return "grows with the context"
    difference = int(floats) - int(lattice)
    return "larger" if difference > 0 else "smaller" if difference < 0 else "as large as Lattice's"


def plot_language(results: dict, path: str | Path) -> None:
    """Plot the held-out perplexity of every model, the best at the top, and what it convolves."""
    rows, _ = trained_and_failed(results)
    found = {name: chosen_rows(rows, model=name) for name in dict.fromkeys(row["model"] for row in rows)}
    values = {name: [row["perplexity"] for row in chosen] for name, chosen in found.items() if chosen}
    names = sorted(values, key=lambda name: -mean_and_deviation(values[name])[0])
    figure, (panel,) = sized_figure(1, results)
    for kind, color in COLORS.items():
        points = [(i, values[n]) for i, n in enumerate(names) if size_of_memory(results["settings"], n) == kind]
        bars(panel, points, f"memory {kind}", {"marker": "o", "color": color}, across=True)
    convolved = {name: memory_text(results["settings"], name)[1] or "nothing" for name in names}
    panel.set_yticks(range(len(names)), [f"{name} (convolves {convolved[name]})" for name in names], fontsize=7)
    panel.set_title("held-out perplexity at 512 tokens", fontsize=11)
    log_scale(panel.xaxis)
    panel.legend(frameon=False, fontsize=7)
    save(figure, path)
