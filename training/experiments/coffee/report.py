"""The tables of the COFFEE experiments: the paper's figures beside those measured here."""

from hf_memmix.conversion.records import markdown_table
from hf_memmix.training.experiments.common.report import language_section

TITLES = {
    1: "Table 1: COFFEE and S6",
    2: "Table 2: one state per feature",
    3: "Table 3: noise before the target",
    4: "Table 4: trigger and target",
    5: "Table 5: length",
    6: "Table 6: ablation",
}

HEAD = ("setting", "parameters", "paper", "best", "median", "worst", "seeds at 0.99", "epochs")
IMAGES_HEAD = ("model", "parameters", "paper, MNIST", "best", "median", "worst", "seeds", "epochs")


def report(reports: list[dict]) -> str:
    """One section per table and per set of images; accuracies over seeds."""
    sections, tables = [], {}
    for found in reports:
        if "data" in found:
            sections.append(_images(found))
            continue
        for name, run in found["runs"].items():
            tables.setdefault(run["table"], []).append((name.partition(": ")[2], run))
    return "\n\n".join([_table(table, tables[table]) for table in sorted(tables)] + sections)


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
    return f"**{TITLES[table]}**\n\n" + markdown_table(HEAD, rows)


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
    return title + "\n\n" + markdown_table(IMAGES_HEAD, rows)


def language(results: dict) -> str:
    """The language models beside COFFEE; the paper has none."""
    return language_section(results, "coffee", {})
