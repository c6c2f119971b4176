"""The tables of the variants of GKA: recall or perplexity of every variant."""

from hf_memmix.conversion.records import markdown_table
from hf_memmix.training.experiments.common.averages import SPREAD_NOTE
from hf_memmix.training.experiments.common.harness import measured_at
from hf_memmix.training.experiments.common.report import above, mean_of_rows

# the paper's average over short tasks, at 2.8 billion parameters: Appendices H, F.2, F.3, G and I. It has no such
# figure for the constant ridge of F.1. Its hybrid has 4 layers of attention among 30
IN_PAPER = {
    "s = D": 58.89,
    "s = D/4": 57.57,
    "no decay": 50.45,
    "no alpha": 58.39,
    "ridge 0.01": 58.43,
    "ridge 0.05": 57.32,
    "ridge 0.1": 58.86,
    "attention second and last": 64.56,
}

FIRST = ("s = D", "s = D/2", "s = D/4")  # the first lines of every table


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


def distance(rows: list[dict], plain: dict[int, dict]) -> str:
    """By how many percent the perplexity of a variant is above that of GKA at the same seeds; "" without them."""
    return "" if rows[0]["variant"] == "s = D" else above(rows, [*plain.values()])


def by_seed(rows: list[dict]) -> str:
    """The accuracy of each seed in percent, in the order of the seeds."""
    return ", ".join(f"{100 * row['accuracy']:.1f}" for row in sorted(rows, key=lambda row: row["seed"]))


def means_of_sketches(files: list[dict]) -> dict[str, list[str]]:
    """The mean of each file's figure with its deviation, as text, without a sketch and with each one."""
    found: dict[str, list[str]] = {name: [] for name in FIRST}
    for results in files:
        for name, cells in found.items():
            rows = [row for row in results["rows"] if row.get("finite") and row["variant"] == name]
            cells.append(mean_of_rows(rows, *figure_key(rows[0])))
    return found


def section(files: list[dict]) -> str:
    """One table per task and length of the only file, with a caption below all of them."""
    (results,) = files
    own, tables = results["settings"], []
    variants = [*FIRST, *(name for name in own["variants"] if name not in FIRST)]
    for name, rows in panels_of(results).items():
        recall = rows[0]["task"] == "recall"
        head, lines = ["variant", name, *([] if recall else ["above s = D", "paper"])], []
        plain = {row["seed"]: row for row in rows if row["variant"] == "s = D"}
        for variant in variants:
            found = [row for row in rows if row["variant"] == variant]
            if not found:
                continue
            if recall:
                cells = [by_seed(found)]
            else:
                mean = mean_of_rows(found, *figure_key(found[0]))
                cells = [mean, distance(found, plain), IN_PAPER.get(variant, "")]
            lines.append([variant, *cells])
        tables.append(markdown_table(head, lines))
    failed = [row for row in results["rows"] if "error" in row or row.get("finite") is False]
    names = ", ".join(f"{row['variant']} ({row['task']}, seed {row['seed']})" for row in failed)
    captions = {
        "recall": f"Recall: accuracy of each seed in percent after {own['recall_tokens'] / 1e6:.0f}M tokens.",
        "text": f"Text: perplexity after {own['tokens'] / 1e6:.0f}M tokens, and its distance from that of s = D at the"
        " same seeds. Paper: average accuracy over short tasks of models of 2.8B parameters.",
    }
    tasks = dict.fromkeys(row["task"] for row in results["rows"])
    spread = [SPREAD_NOTE] if "text" in tasks else []
    caption = " ".join([*(captions[task] for task in tasks), *spread, f"{measured_at(results)}."])
    return "\n\n".join([*tables, caption + (f" Failed: {names}." if names else "")])
