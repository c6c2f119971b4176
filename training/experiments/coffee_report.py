"""The COFFEE experiments' JSON files as Markdown tables: the paper's figures beside those measured here.

python -m hf_memmix.training.experiments.coffee_report RESULTS.json [RESULTS.json ...]
"""

import json
import sys
from pathlib import Path

from hf_memmix.training.experiments.coffee_plots import TITLES

HEAD = ("setting", "parameters", "paper", "best", "median", "worst", "seeds at 0.99", "epochs")
IMAGES_HEAD = ("model", "parameters", "paper, MNIST", "best", "median", "worst", "seeds", "epochs")


def report(reports: list[dict]) -> str:
    """One section a table, and one for each set of images; accuracies over seeds."""
    sections, tables = [], {}
    for found in reports:
        if "data" in found:
            sections.append(_images(found))
            continue
        for name, run in found["runs"].items():
            tables.setdefault(run["table"], []).append((name.partition(": ")[2], run))
    return "\n\n".join([_table(table, tables[table]) for table in sorted(tables)] + sections) + "\n"


def _table(table: int, runs: list[tuple[str, dict]]) -> str:
    rows = []
    for name, run in runs:
        if "error" in run:
            rows.append((name, "", run["paper"], run["error"], "", "", "", ""))
            continue
        best = run["best_accuracy"]
        figures = (f"{best['max']:.3f}", f"{best['median']:.3f}", f"{best['min']:.3f}")
        solved = f"{run['seeds_at_0.99']} of {run['seeds']}"
        rows.append((name, run["parameters"], run["paper"], *figures, solved, f"{run['iterations'] / 10_000:.1f}"))
    return f"**{TITLES[table]}**\n\n" + markdown(HEAD, rows)


def _images(found: dict) -> str:
    data, rows = found["data"], []
    for name, run in found["runs"].items():
        if "error" in run:
            rows.append((name, "", run["paper_on_mnist"], run["error"], "", "", "", ""))
            continue
        last = sorted(run["last"]["accuracy"])
        figures = (f"{last[-1]:.3f}", f"{last[len(last) // 2]:.3f}", f"{last[0]:.3f}")
        epochs = run["iterations"] / -(-data["train"] // run["batch"])
        rows.append((name, run["parameters"], run["paper_on_mnist"], *figures, run["seeds"], f"{epochs:.0f}"))
    title = f"**Table 7, on {data['name']}** ({data['train']} training images of {data['size']} x {data['size']})"
    return title + "\n\n" + markdown(IMAGES_HEAD, rows)


def markdown(head, rows) -> str:
    """A table of a head and rows of anything that `str` writes."""
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in (head, ["---"] * len(head), *rows))


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    sys.stdout.write(report([json.loads(Path(path).read_text()) for path in sys.argv[1:]]))
