"""The tables of the Echo experiments, with the paper's figures in brackets.

Accuracies are in percent: mean and standard deviation over seeds. The accuracy of a task is the mean over its cells.
The accuracy at a length is the mean over the cells of the two trained tasks at this length. SKA gets the true action
mask, also when it is measured, unless a table says otherwise: `mask_table` has it without the mask.
"""

import math
import statistics

from hf_memmix.conversion.records import markdown_table
from hf_memmix.training.experiments.common.averages import SPREAD_NOTE, spread_text
from hf_memmix.training.experiments.common.harness import matches, measured_at
from hf_memmix.training.experiments.common.rates import at_edge, chosen_rows, lowest_dev_loss
from hf_memmix.training.experiments.common.report import rate_text
from hf_memmix.training.experiments.echo.suite import (
    MODELS,
    SOLVED,
    TRAINED,
    budget_of,
    memory_of,
    sequences_per_step,
)

TASKS_PAPER = {
    "mqar": {"ssm": 55.1, "attention": 76.0, "ska": 82.2},
    "system_prompt": {"ssm": 64.2, "attention": 81.3, "ska": 85.3},
    "tool_trace": {"ssm": 56.5, "attention": 76.2, "ska": 80.5},
    "niah": {"ssm": 52.0, "attention": 81.1, "ska": 84.2},
    "multi_hop": {"ssm": 39.3, "attention": 71.1, "ska": 76.7},
    "common_word": {"ssm": 52.9, "attention": 68.2, "ska": 74.1},
}
# the line "Mean" of the paper's Table 3, as printed; the means of its own lines above are 53.3, 75.7 and 80.5
MEAN_PAPER = {"ssm": 54.4, "attention": 76.2, "ska": 81.1}
TITLES = {
    "ssm": "Mamba-2",
    "attention": "attention",
    "ska": "SKA, true mask",
    "ska-unmasked": "SKA, no mask",
    "ska-unmasked-k1": "SKA, no mask, K = 1",
}
LENGTHS_PAPER = {
    length: dict(zip(MODELS, row, strict=True))
    for length, row in {
        64: (88.6, 88.5, 94.5),
        128: (82.1, 97.4, 89.4),
        256: (75.8, 92.9, 93.3),
        512: (66.9, 78.1, 95.6),
        1024: (37.3, 64.8, 86.4),
        2048: (2.0, 42.5, 81.2),
        4096: (2.0, 5.0, 65.1),
    }.items()
}


def at_best_rate(rows: list[dict], **wanted) -> list[dict]:
    """The trained rows with the wanted values, of all seeds, at the learning rate with the lowest mean development
    loss.

    The mean is over the seeds that every rate has finished. A rate is not chosen if one of its trainings diverged.
    """
    by_rate = {}
    for row in rows:
        if matches(row, wanted) and ("dev_loss" in row or row.get("finite") is False):
            by_rate.setdefault(row["lr"], {})[row["seed"]] = row
    if not by_rate:
        return []
    seeds = set.intersection(*map(set, by_rate.values())) or {min(min(found) for found in by_rate.values())}

    def loss(rate: float) -> float:
        losses = [row.get("dev_loss", math.inf) for seed, row in by_rate[rate].items() if seed in seeds]
        return statistics.fmean(losses) if losses else math.inf

    return list(by_rate[min(by_rate, key=loss)].values())


def chosen(rows: list[dict]) -> dict[str, list[dict]]:
    """For each model, the measured rows of all seeds at its best learning rate."""
    found = {model: [row for row in at_best_rate(rows, model=model) if "cells" in row] for model in MODELS}
    return {model: rows for model, rows in found.items() if rows}


def mean_of(row: dict, kind: str = "cells", tasks=tuple(TASKS_PAPER), length: int | None = None) -> float | None:
    """Mean accuracy in percent over the cells of a row with these tasks and this length; None without such cells."""
    tasks = (tasks,) if isinstance(tasks, str) else tasks
    accuracies = [a for task, n, _, a in row[kind] if task in tasks and length in (None, n)]
    return 100 * statistics.fmean(accuracies) if accuracies else None


def _figures(values: list[float | None], paper: float | None = None) -> str:
    text = spread_text(values, 1)
    return text + (f" ({paper})" if text and paper is not None else "")


def columns(rows: list[dict]) -> dict[tuple[str, float], list[dict]]:
    """The measured rows of each model at each learning rate, the rate with the lowest development loss first."""
    found = {}
    for model in chosen(rows):
        measured = [row for row in rows if row["model"] == model and "cells" in row]
        best = chosen(rows)[model][0]["lr"]
        for lr in sorted({row["lr"] for row in measured}, key=lambda lr: (lr != best, lr)):
            found[model, lr] = [row for row in measured if row["lr"] == lr]
    return found


def transfer_tables(results: dict) -> str:
    """The paper's Tables 3 (accuracy by task) and 2 (accuracy by length), with the figures measured here.

    Every model has a column for each learning rate. The one that the development loss chooses comes first, with the
    paper's figure.
    """
    found, lengths = columns(results["rows"]), results["settings"]["lengths"]
    best = dict(reversed(found))
    head = [f"{TITLES[model]}, {lr:g}" for model, lr in found]

    def line(name, figure, paper: dict) -> tuple:
        cells = [
            _figures([figure(row) for row in rows], paper.get(model) if lr == best[model] else None)
            for (model, lr), rows in found.items()
        ]
        return (name, *cells)

    tasks = [line(task, lambda row, task=task: mean_of(row, tasks=task), paper) for task, paper in TASKS_PAPER.items()]
    tasks.append(line("mean of tasks", _task_mean, MEAN_PAPER))
    by_length = [
        line(length, lambda row, n=length: mean_of(row, tasks=TRAINED, length=n), LENGTHS_PAPER.get(length, {}))
        for length in lengths
    ]
    by_length.append(
        ("development loss", *(spread_text([r.get("dev_loss") for r in rows], 4) for rows in found.values()))
    )
    ska = next((rows for (model, _), rows in found.items() if model == "ska"), [])
    refreshed = [
        (length, _figures([mean_of(r, "refreshed", TRAINED, length) for r in ska if "refreshed" in r]))
        for length in lengths
    ]
    tables = [
        "**Tasks**, by model and learning rate (paper)", markdown_table(("task", *head), tasks),
        "**Length, tokens** (paper)", markdown_table(("length", *head), by_length),
    ]  # fmt: skip
    if any(text for _, text in refreshed):
        tables += ["**SKA refreshed at every token**", markdown_table(("length", "SKA, true mask"), refreshed)]
    return "\n\n".join([*tables, _sizes(found)])


def _sizes(found: dict[tuple[str, float], list[dict]]) -> str:
    """A sentence with the parameters of each model and the memory of its inner layers."""
    models = {model: rows[0]["parameters"] for (model, _), rows in found.items()}
    parts = []
    for model, parameters in models.items():
        floats = memory_of(model)
        memory = f"{floats:,} floats" if floats else "grows"
        parts.append(f"{TITLES[model]} {parameters / 1e6:.2f}M, {memory}")
    return f"Parameters, and memory of an inner layer: {'; '.join(parts)}."


def _mean_at(row: dict, tasks: tuple[str, ...], lengths: list[int]) -> float | None:
    """Mean accuracy in percent over the cells with these tasks and lengths; None without such cells."""
    accuracies = [a for task, n, _, a in row["cells"] if task in tasks and n in lengths]
    return 100 * statistics.fmean(accuracies) if accuracies else None


# columns of `mask_table`: the variant of the ablation, and its title
WITHOUT_MASK = {
    "no action mask": "SKA, no mask",
    "no action mask, K = 1": "SKA, no mask, K = 1",
    "no action mask, last two layers": "SKA, no mask, last two layers",
}
WITH_MASK = {"K = 2, chunks of 8": "SKA, true mask"}


def mask_table(transfer: dict, ablation: dict) -> str:
    """Accuracy by length without and with the true action mask, beside Mamba-2 and attention at both learning rates.

    The models that get no mask come first: they read the same input.
    """
    lengths = [n for n in ablation["settings"]["lengths"] if n in transfer["settings"]["lengths"]]
    variants = {}
    for row in ablation["rows"]:
        if "cells" in row:
            variants.setdefault(row["variant"], []).append(row)
    rate = ablation["settings"]["lr"]

    def of_variants(titles):
        return {f"{title}, {rate:g}": variants[name] for name, title in titles.items() if name in variants}

    baselines = {
        f"{TITLES[model]}, {lr:g}": rows for (model, lr), rows in columns(transfer["rows"]).items() if model != "ska"
    }
    shown = of_variants(WITHOUT_MASK) | baselines | of_variants(WITH_MASK)
    groups = {f"trained tasks, {n}": (TRAINED, [n]) for n in lengths}
    groups["other tasks, these lengths"] = (tuple(task for task in TASKS_PAPER if task not in TRAINED), lengths)
    lines = [
        (name, *(_figures([_mean_at(row, *of) for row in rows]) for rows in shown.values()))
        for name, of in groups.items()
    ]
    lines.append(("seeds", *(len(rows) for rows in shown.values())))
    return (
        markdown_table(("accuracy in percent at tokens", *shown), lines)
        + f"\n\nThe number after a name is the learning rate. {measured_at(transfer)} and {measured_at(ablation)}."
        f" {SPREAD_NOTE}"
    )


def _task_mean(row: dict) -> float | None:
    """The mean over tasks of the mean accuracy per task; None if a task was not measured."""
    means = [mean_of(row, tasks=task) for task in TASKS_PAPER]
    return None if None in means else statistics.fmean(means)


def ablation_table(results: dict) -> str:
    """One line per variant: accuracy on trained tasks, on other tasks, by length, and with `refresh_every=1`."""
    lengths, variants = results["settings"]["lengths"], {}
    for row in results["rows"]:
        if "cells" in row:
            variants.setdefault(row["variant"], []).append(row)
    others = tuple(task for task in TASKS_PAPER if task not in TRAINED)
    lines = [
        (
            name,
            len(rows),
            _figures([mean_of(r, tasks=TRAINED) for r in rows]),
            _figures([mean_of(r, tasks=others) for r in rows]),
            *(_figures([mean_of(r, tasks=TRAINED, length=n) for r in rows]) for n in lengths),
            _figures([mean_of(r, "refreshed", TRAINED) for r in rows if "refreshed" in r]),
        )
        for name, rows in variants.items()
    ]
    head = ("SKA with", "seeds", "trained tasks", "other tasks", *(f"at {n}" for n in lengths), "refreshed")
    return markdown_table(head, lines)


def grid_accuracies(results: dict, model: str, pairs: int, gap: int) -> list[float]:
    """The accuracies in percent of a model in a cell, of all seeds, at the rate with the lowest development loss."""
    rows = at_best_rate(results["rows"], model=model, pairs=pairs, gap=gap)
    return [100 * row["accuracy"] for row in rows if "accuracy" in row]


def answers_seen(results: dict, row: dict) -> int:
    """How many answers a model of the grid was trained on."""
    return row["steps"] * sequences_per_step(results["settings"], row) * row["pairs"]


def grid_table(results: dict) -> str:
    """A table of the accuracy of every model in every cell, and of the answers that SKA saw in training.

    "(edge)": the cell is not solved, and no larger or no smaller rate was tried. With several seeds: `answers_table`.
    """
    if results["settings"]["seeds"] > 1:
        return answers_table(results)
    models = [name for name in results["settings"]["models"] if any(r["model"] == name for r in results["rows"])]
    lines = []
    for pairs, gap, *_ in results["settings"]["cells"]:
        ska = at_best_rate(results["rows"], model="ska", pairs=pairs, gap=gap)
        seen = f"{max(answers_seen(results, row) for row in ska):,}" if ska else ""
        cells = []
        for name in models:
            found = grid_accuracies(results, name, pairs, gap)
            cells.append(_figures(found) + edge_text(results["rows"], model=name, pairs=pairs, gap=gap))
        lines.append((pairs, gap, *cells, seen))
    return markdown_table(("pairs", "gap", *(TITLES[name] for name in models), "answers seen by SKA"), lines)


# what the paper's text says of its models of 50M parameters in the cells of the recall grid, in percent
GRID_PAPER = {"ssm": "chance", "ska": "100"}


def answers_table(results: dict) -> str:
    """A line for every model in every cell of a grid with several seeds: the accuracy of each seed, and the answers
    that it saw in training until its loss was small enough, or until the end."""
    lines = []
    for pairs, gap, *_ in results["settings"]["cells"]:
        for name in results["settings"]["models"]:
            cell = {"model": name, "pairs": pairs, "gap": gap}
            rows = [row for row in at_best_rate(results["rows"], **cell) if "accuracy" in row]
            if not rows:
                continue
            rows.sort(key=lambda row: row["seed"])
            tried = [row for row in results["rows"] if matches(row, cell | {"seed": 0})]
            solved = min(row["dev_loss"] for row in rows) < SOLVED
            rate = f"{rows[0]['lr']:g}" if solved else rate_text(tried, rows[0]["lr"])
            accuracies = [100 * row["accuracy"] for row in rows]
            seen = [answers_seen(results, row) for row in rows]
            answers = " to ".join(dict.fromkeys(f"{n / 1e6:.2f}M" for n in (min(seen), max(seen))))
            by_seed = ", ".join(f"{a:.1f}" for a in accuracies)
            paper = GRID_PAPER.get(name, "")
            lines.append((pairs, gap, TITLES[name], rate, _figures(accuracies), by_seed, answers, paper))
    head = ("pairs", "gap", "model", "rate", "accuracy in percent", "by seed", "answers seen", "paper, 50M")
    return markdown_table(head, lines)


def edge_text(rows: list[dict], **cell) -> str:
    """The mark of a model that has not solved a cell of the grid, if a rate outside of those tried may be better."""
    tried = [row for row in rows if matches(row, {**cell, "seed": 0}) and "dev_loss" in row]
    best = lowest_dev_loss(tried)
    unsolved = best is not None and best["dev_loss"] >= SOLVED
    return " (edge)" if unsolved and at_edge(tried, best["lr"]) else ""


LEARNED = 0.95  # the accuracy from which a tier of the scratchpad counts as learned
SCALES_PAPER = ("ska, eta 1.5", "ska, eta 3")  # the standard scale, and a larger one whose value is not known
# what the paper's text says of its Figure 3: accuracy in percent, and steps until it is reached
CURVES_PAPER = {
    ("easy", "ska"): "100 after 500",
    ("hard", "ska"): "100 after 750 to 1,000",
    ("easy", "ssm"): "10 to 20 (Mamba-3)",
    ("hard", "ssm"): "at most 16 (Mamba-3)",
}


def learned_at(row: dict) -> str:
    """The first recorded step whose accuracy is at least `LEARNED`; "no" if there is none."""
    if "accuracies" not in row:  # rows of the first run
        return "not recorded"
    return next((str(step) for step, accuracy in row["accuracies"] if accuracy >= LEARNED), "no")


def tiers_of(results: dict) -> list[str]:
    """The tiers of the rows, in the order of the settings; rows end in any order."""
    asked = results["settings"].get("tiers", [])
    found = dict.fromkeys(row["tier"] for row in results["rows"])
    return sorted(found, key=lambda tier: asked.index(tier) if tier in asked else len(asked))


def scratchpad_table(results: dict) -> str:
    """Accuracy of every model in every tier at its chosen rate, and the steps after which the seeds had learned."""
    lines = []
    for tier in tiers_of(results):
        for name in results["settings"]["variants"]:
            rows = [row for row in results["rows"] if matches(row, {"tier": tier, "variant": name})]
            found = [row for row in chosen_rows(rows, variant=name) if "accuracy" in row]
            if not found:
                continue
            learned = ", ".join(map(learned_at, found))
            accuracy = _figures([100 * row["accuracy"] for row in found])
            rate = rate_text(rows, found[0]["lr"]) if found[0]["dev_loss"] >= SOLVED else f"{found[0]['lr']:g}"
            paper = CURVES_PAPER.get((tier, "ska" if name in SCALES_PAPER else name), "")
            lines.append((tier, name, rate, accuracy, len(found), learned, paper))
    head = ("tier", "model", "rate", "accuracy in percent", "seeds", f"step with {LEARNED:.0%}, by seed", "paper")
    return markdown_table(head, lines)


REPORTS = {
    "echo_transfer": transfer_tables,
    "echo_ablation": ablation_table,
    "echo_mqar": grid_table,
    "echo_scratchpad": scratchpad_table,
}


def steps_text(settings: dict) -> str:
    """How many steps a training has at most: of all cells of the recall grid, or of each."""
    cells = settings.get("cells", ())
    if all(len(cell) == 2 for cell in cells):
        return f"{settings['steps']} steps"
    own = [(pairs, gap, budget_of(settings, {"pairs": pairs, "gap": gap})[1]) for pairs, gap, *_ in cells]
    return "Steps at most: " + ", ".join(f"{steps} with {pairs} pairs at {gap}" for pairs, gap, steps in own)


def report(results: dict) -> str:
    """The tables of one experiment, the number of measurements that failed, the hardware and the commits."""
    text = REPORTS[results["experiment"]](results)
    failed = sum(len(row.get("errors", ())) + ("error" in row) for row in results["rows"])
    text += f"\n\n{failed} measurements failed." if failed else ""
    return f"{text}\n\n{steps_text(results['settings'])}; {measured_at(results)}. {SPREAD_NOTE}"
