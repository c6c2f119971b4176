"""The tables of the COFFEE experiments: the paper's figures beside those measured here."""

from statistics import quantiles

from hf_memmix.conversion.records import markdown_table
from hf_memmix.training.experiments.common.averages import SPREAD_NOTE, mean_and_deviation, median, spread_text
from hf_memmix.training.experiments.common.harness import measured_at
from hf_memmix.training.experiments.common.rates import chosen_rows, trained_and_failed
from hf_memmix.training.experiments.common.report import language_section, rate_text

TITLES = {
    1: "Table 1: COFFEE and S6",
    2: "Table 2: one state per feature",
    3: "Table 3: noise before the target",
    4: "Table 4: trigger and target",
    5: "Table 5: length",
    6: "Table 6: ablation",
}

HEAD = ("setting", "parameters", "paper", "best", "median", "worst", "seeds at 0.99", "epochs")
IMAGES_HEAD = ("model", "parameters", "paper, MNIST", "mean", "best", "median", "worst", "seeds", "epochs")


def report(reports: list[dict]) -> str:
    """One section per table and per set of images; accuracies over seeds."""
    sections, tables = [], {}
    for found in reports:
        if "data" in found:
            sections.append(_images(found))
            continue
        seeds = f", seeds drawn from {found['seed']}" if found.get("seed") else ""
        for name, run in found["runs"].items():
            tables.setdefault(run["table"], []).append((name.partition(": ")[2] + seeds, run))
    parts = [_table(table, tables[table]) for table in sorted(tables)] + sections
    if tables:
        evaluations = max(len(run["curve"]) for runs in tables.values() for _, run in runs if "curve" in run)
        parts.append(
            f"The figure of a seed is the highest of its evaluations, at most {evaluations}, each on 10,000 new"
            " sequences. The paper also keeps the best model of a training."
        )
    return "\n\n".join(parts)


def _spread(accuracies: list[float]) -> tuple[str, str, str]:
    """Best, median and worst of the seeds' accuracies, as text."""
    return tuple(f"{value:.3f}" for value in (max(accuracies), median(accuracies), min(accuracies)))


def _table(table: int, runs: list[tuple[str, dict]]) -> str:
    rows = []
    for name, run in runs:
        if "error" in run:
            rows.append((name, "", run["paper"], run["error"], "", "", "", ""))
            continue
        figures = _spread(run["best_accuracy_of_seeds"])
        solved = f"{run['seeds_at_0.99']} of {run['seeds']}"
        rows.append((name, run["parameters"], run["paper"], *figures, solved, f"{run['iterations'] / 10_000:.1f}"))
    return f"**{TITLES[table]}**\n\n" + markdown_table(HEAD, rows)


def equal_epochs(titles: tuple[str, str], first: list[dict], second: list[dict]) -> str:
    """Two sets of runs at equal numbers of epochs: a line for each setting of a table that both have.

    A setting is the same if table, model, sizes, task and rate are. A seed's figure is the highest of its evaluations
    up to the last step at which both runs were evaluated: a run that a time limit stopped has an evaluation at its
    end, which the other run lacks.

    Args:
        titles: what is different in the two sets.
        first, second: the results of `tables.py`.
    """
    same, lines = ("table", "model", "states", "dim", "task", "learning_rate"), []
    for _, run in _runs(first):
        for name, other in _runs(second):
            if any(run[key] != other[key] for key in same):
                continue
            end = max({p["iteration"] for p in run["curve"]} & {p["iteration"] for p in other["curve"]}, default=0)
            if not end:
                continue
            pair = [best_until(of, end) for of in (run, other)]
            cells = [_middle(best) for best in pair]
            distance = 100 * (median(pair[1]) - median(pair[0]))
            lines.append((run["table"], name, f"{end / 10_000:.1f}", *cells, f"{distance:+.1f}"))
    return markdown_table(("table", "setting", "epochs", *titles, "distance, points"), lines) + (
        "\n\nAfter equal numbers of epochs: the median over seeds; in brackets, the quartiles and how many seeds reach"
        " 0.99."
    )


def _middle(best: list[float]) -> str:
    low, _, high = quantiles(best, n=4, method="inclusive") if len(best) > 1 else best * 3
    return f"{median(best):.3f} ({low:.3f} to {high:.3f}; {sum(a >= 0.99 for a in best)} of {len(best)})"


def _runs(reports: list[dict]) -> list[tuple[str, dict]]:
    """The names and results of all runs that were measured, in the order of their tables."""
    found = [(name.partition(": ")[2], run) for report in reports for name, run in report["runs"].items()]
    return sorted((pair for pair in found if "curve" in pair[1]), key=lambda pair: pair[1]["table"])


def best_until(run: dict, iterations: int) -> list[float]:
    """For each seed, the highest accuracy of its evaluations in the first `iterations` steps."""
    curve = [point["accuracy"] for point in run["curve"] if point["iteration"] <= iterations]
    return [max(accuracies) for accuracies in zip(*curve, strict=True)]


def _images(found: dict) -> str:
    data, rows = found["data"], []
    for name, run in found["runs"].items():
        if "error" in run:
            rows.append((name, "", run["paper_on_mnist"], run["error"], "", "", "", "", ""))
            continue
        figures = (spread_text(run["last"]["accuracy"], 3), *_spread(run["last"]["accuracy"]))
        epochs = run["iterations"] / -(-data["train"] // run["batch"])
        rows.append((name, run["parameters"], run["paper_on_mnist"], *figures, run["seeds"], f"{epochs:.0f}"))
    title = f"**Table 7, on {data['name']}** ({data['train']} training images of {data['size']} x {data['size']})"
    table = markdown_table(IMAGES_HEAD, rows)
    return f"{title}\n\n{table}\n\nThe figure of a seed is its accuracy at the end of the training, on test images."


def pixels(results: dict) -> str:
    """Accuracy of the classifiers of pixel sequences at the rate that the development images chose."""
    rows, (kept, failed) = [], trained_and_failed(results)
    for name in results["settings"]["models"]:
        chosen = chosen_rows(kept, model=name)
        if not chosen:
            continue
        lr = chosen[0]["lr"]
        of_model = [row for row in kept if row["model"] == name and row["seed"] == 0]
        loss, _ = mean_and_deviation(row["test_loss"] for row in chosen)
        accuracy = spread_text([row["accuracy"] for row in chosen], 3, alone=" (1 seed)")
        rows.append((name, chosen[0]["parameters"], rate_text(of_model, lr), f"{loss:.3f}", accuracy, len(chosen)))
    table = markdown_table(("model", "parameters", "rate", "test loss", "accuracy", "seeds"), rows)
    own = results["settings"]
    names = ", ".join(f"{row['model']} at {row['lr']:g}, seed {row['seed']}" for row in failed)
    return (
        f"{table}\n\n784 pixels, one layer of {own['hidden_size']} features; {own['steps']} steps of"
        f" {own['batch_size']} images. {SPREAD_NOTE} {measured_at(results)}."
        + (f" Failed or no better than chance: {names}." if names else "")
    )


def language(results: dict) -> str:
    """The language models beside COFFEE; the paper has none."""
    return language_section(results, "coffee", {})
