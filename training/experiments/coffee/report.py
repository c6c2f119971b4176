"""The tables of the COFFEE experiments: the paper's figures beside those measured here."""

from hf_memmix.conversion.records import markdown_table
from hf_memmix.training.experiments.common.averages import median, spread_text

# by number, what the paper's tables vary
TITLES = {
    1: "COFFEE and S6",
    2: "one state per feature",
    3: "noise before the target",
    4: "trigger and target",
    5: "length",
    6: "ablation",
}

HEAD = ("table", "setting", "paper", "best", "median", "worst", "seeds at 0.99", "epochs")
IMAGES_HEAD = ("model", "parameters", "paper, MNIST", "mean", "best", "median", "worst", "seeds", "epochs")


def report(reports: list[dict]) -> str:
    """One table of all induction heads, and one per set of images; accuracies over seeds."""
    sections, tables = [], {}
    for found in reports:
        if "data" in found:
            sections.append(_images(found))
            continue
        for name, run in found["runs"].items():
            tables.setdefault(run["table"], []).append((name.partition(": ")[2], run))
    if tables:
        sections.insert(0, _tables(tables))
    return "\n\n".join(sections)


def epochs_text(run: dict, images: int) -> str:
    """The epochs of a training on so many images; "445 of 600" if it was stopped before its planned end."""
    done, planned = (run[key] / -(-images // run["batch"]) for key in ("iterations", "planned_iterations"))
    return f"{done:.0f}" + (f" of {planned:.0f}" if done < planned else "")


def table_of_images(setting: str) -> str:
    """The place in the paper of a setting of `images.py`."""
    return "Appendix I.2.1" if setting.startswith("pixels: ") else "Table 7"


def _spread(accuracies: list[float]) -> tuple[str, str, str]:
    """Best, median and worst of the seeds' accuracies, as text."""
    return tuple(f"{value:.3f}" for value in (max(accuracies), median(accuracies), min(accuracies)))


def _tables(tables: dict[int, list[tuple[str, dict]]]) -> str:
    """One line per run, in the order of the paper's tables."""
    rows, evaluations = [], 0
    for table, (name, run) in ((number, pair) for number in sorted(tables) for pair in tables[number]):
        if "error" in run:
            rows.append((table, name, run["paper"], run["error"], "", "", "", ""))
            continue
        evaluations = max(evaluations, len(run["curve"]))
        figures = _spread(run["best_accuracy_of_seeds"])
        solved = f"{run['seeds_at_0.99']} of {run['seeds']}"
        rows.append((table, name, run["paper"], *figures, solved, f"{run['iterations'] / 10_000:.1f}"))
    titles = ", ".join(f"{table} {TITLES[table]}" for table in sorted(tables))
    return (
        f"{markdown_table(HEAD, rows)}\n\nTables: {titles}. The figure of a seed is the highest of its evaluations, at"
        f" most {evaluations}, each on 10,000 new sequences. The paper also keeps the best model of a training."
    )


def _images(found: dict) -> str:
    data, where, rows = found["data"], found["environment"], []
    for name, run in found["runs"].items():
        if "error" in run:
            rows.append((name, "", run["paper_on_mnist"], run["error"], "", "", "", "", ""))
            continue
        figures = (spread_text(run["last"]["accuracy"], 3), *_spread(run["last"]["accuracy"]))
        cells = (*figures, run["seeds"], epochs_text(run, data["train"]))
        rows.append((name, run["parameters"], run["paper_on_mnist"], *cells))
    size = f" of {data['size']} x {data['size']}" if "size" in data else ""
    parts = " and ".join(dict.fromkeys(map(table_of_images, found["runs"])))
    title = f"**{parts}, on {data['name']}** ({data['train']} training images{size})"
    table = markdown_table(IMAGES_HEAD, rows)
    note = "The figure of a seed is its accuracy at the end of the training, on test images."
    place = ", commit ".join(where[key] for key in ("hardware", "commit") if key in where)
    return f"{title}\n\n{table}\n\n{note} {place}."
