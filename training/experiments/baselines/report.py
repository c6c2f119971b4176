"""The table and the plot of the baselines' language models."""

from pathlib import Path

from hf_memmix.training.experiments.common.averages import mean_and_deviation
from hf_memmix.training.experiments.common.plots import bars, log_scale, save, sized_figure
from hf_memmix.training.experiments.common.rates import at_edge, chosen_rows, trained_and_failed
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
    """Plot the held-out perplexity of every model, the best at the top, with what it convolves and its rate.

    A marker is hollow if no larger or no smaller rate was tried, so the model may be better than it is shown.
    """
    rows, failed = trained_and_failed(results)
    found = {name: chosen_rows(rows, model=name) for name in dict.fromkeys(row["model"] for row in rows)}
    values = {name: [row["perplexity"] for row in chosen] for name, chosen in found.items() if chosen}
    names = sorted(values, key=lambda name: -mean_and_deviation(values[name])[0])
    figure, (panel,) = sized_figure(1, results)
    tried = {name: [row for row in rows + failed if row["model"] == name] for name in names}
    edge = {name: at_edge(tried[name], found[name][0]["lr"]) for name in names}
    for kind, color in COLORS.items():
        of_kind = [(i, name) for i, name in enumerate(names) if size_of_memory(results["settings"], name) == kind]
        for hollow, fill in ((False, color), (True, "white")):
            points = [(i, values[name]) for i, name in of_kind if edge[name] == hollow]
            label = f"memory {kind}" + ", rate at the edge" * hollow
            bars(panel, points, label, {"marker": "o", "color": color, "markerfacecolor": fill}, across=True)
    inputs = {name: memory_text(results["settings"], name)[1] or "nothing" for name in names}
    labels = [f"{name}, rate {found[name][0]['lr']:g}, convolves {inputs[name]}" for name in names]
    panel.set_yticks(range(len(names)), labels, fontsize=7)
    panel.set_title("held-out perplexity at 512 tokens", fontsize=11, loc="right")  # the labels leave little width
    log_scale(panel.xaxis)
    figure.legend(loc="outside upper center", ncols=2, frameon=False, fontsize=7)
    save(figure, path)
