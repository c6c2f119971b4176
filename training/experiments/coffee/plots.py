"""The plots of the COFFEE paper's experiments.

`plot_ih0` draws the paper's Figure 2: embeddings, the path of the state for two sequences, and the region of each
answer. `plot_tables` draws accuracy against epochs: a line for the median seed of each setting, a band from the worst
to the best seed.
"""

from pathlib import Path

from hf_memmix.training.experiments.coffee.report import TITLES
from hf_memmix.training.experiments.common.averages import median
from hf_memmix.training.experiments.common.harness import measured_at
from hf_memmix.training.experiments.common.plots import figure_of, pyplot_without_screen, save
from hf_memmix.training.experiments.common.rates import chosen_rows, trained_and_failed

GREY, BLUE, RED = "#888888", "#2f6fa7", "#b5485d"
REGIONS = ("#fbeee0", "#e3eef7", "#e8f3e4")
PATHS = {"1231": BLUE, "3121": RED}


def plot_ih0(results: dict, path: Path) -> None:
    """Plot the paths of the states of the learned model and of the model with the paper's embeddings, side by side."""
    pyplot = pyplot_without_screen()
    import numpy as np

    panels = {"learned": "learned here", "with_the_papers_embeddings": "the paper's embeddings"}
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 5), constrained_layout=True, sharex=True, sharey=True)
    for panel, (key, title) in zip(axes, panels.items(), strict=True):
        found = results[key]
        embeddings = np.array(found["embeddings"])
        x, y = np.meshgrid(np.linspace(-13, 8, 400), np.linspace(-13, 8, 400))
        nearest = np.argmin(np.hypot(x[..., None] - embeddings[:, 0], y[..., None] - embeddings[:, 1]), -1)
        panel.contourf(x, y, nearest, levels=[-0.5, 0.5, 1.5, 2.5], colors=REGIONS)
        for symbol, (a, b) in enumerate(embeddings, 1):
            panel.annotate("", (a, b), (0, 0), arrowprops={"arrowstyle": "->", "color": GREY})
            panel.text(a, b, f"“{symbol}”", color=GREY, ha="right", va="bottom")
        for sequence, color in PATHS.items():
            states = np.array([[0.0, 0.0], *found["states"][sequence]])
            for start, stop in zip(states, states[1:], strict=False):
                panel.annotate("", stop, start, arrowprops={"arrowstyle": "->", "color": color, "lw": 1.6})
            panel.plot(*states[-1], "o", color=color, label=f"{sequence}: ({states[-1][0]:.2f}, {states[-1][1]:.2f})")
        panel.set_title(f"{title}: {found['right']} of {found['of']} right", fontsize=11)
        panel.set_xlabel("state 1")
        panel.legend(loc="lower right", frameon=False, fontsize=9)
    axes[0].set_ylabel("state 2")
    save(figure, path, dpi=130)


def plot_tables(reports: list[dict], path: Path) -> None:
    """Plot accuracy against epochs, with one panel per table."""
    pyplot = pyplot_without_screen()
    runs = [(name, run) for report in reports for name, run in report["runs"].items() if "error" not in run]
    tables = sorted({run["table"] for _, run in runs})
    rows = -(-len(tables) // 3)
    figure, axes = pyplot.subplots(rows, min(3, len(tables)), figsize=(15, 4 * rows), squeeze=False)
    for panel, table in zip(axes.flat, tables, strict=False):
        for name, run in runs:
            if run["table"] != table:
                continue
            epochs = [row["iteration"] / 10_000 for row in run["curve"]]
            accuracies = [sorted(row["accuracy"]) for row in run["curve"]]
            label = f"{name.partition(': ')[2]} ({run['parameters']} p)"
            (line,) = panel.plot(epochs, [median(a) for a in accuracies], label=label)
            low, high = zip(*((a[0], a[-1]) for a in accuracies), strict=True)
            panel.fill_between(epochs, low, high, color=line.get_color(), alpha=0.15)
        panel.set(title=TITLES[table], xlabel="epochs of 5.12 M sequences", ylabel="accuracy", ylim=(0, 1.02))
        panel.grid(alpha=0.3)
        panel.legend(frameon=False, fontsize=7)
    for panel in list(axes.flat)[len(tables) :]:
        panel.set_axis_off()
    figure.supxlabel(", ".join(sorted({report["environment"]["hardware"] for report in reports})), fontsize=8)
    figure.tight_layout()
    save(figure, path, dpi=130)


def plot_pixels(results: dict, path: Path) -> None:
    """Plot the classifiers of pixel sequences: training loss by step, and the accuracy of every seed."""
    figure, (losses, accuracies) = figure_of(2, measured_at(results))
    rows, _ = trained_and_failed(results)
    found = {name: chosen_rows(rows, model=name) for name in results["settings"]["models"]}
    found = {name: chosen for name, chosen in found.items() if chosen}
    for place, (name, chosen) in enumerate(found.items()):
        steps = [step for step, _ in chosen[0]["curve"]]
        of_seeds = [[loss for _, loss in row["curve"]] for row in chosen]
        losses.plot(steps, [sum(values) / len(values) for values in zip(*of_seeds, strict=True)], label=name)
        values = [100 * row["accuracy"] for row in chosen]
        accuracies.plot([place] * len(values), values, "o", color=f"C{place}", alpha=0.5)
        accuracies.plot(place, sum(values) / len(values), "_", color=f"C{place}", markersize=24, markeredgewidth=2)
    losses.set(title="training loss, mean of the seeds", xlabel="step", ylim=(0, None))
    losses.legend(frameon=False)
    accuracies.set_title("accuracy on test images, %")
    accuracies.set_xticks(range(len(found)), list(found))
    save(figure, path)
