"""The recall of a few students in one table, for readers of the project's README."""

from hf_memmix.conversion.records import bytes_text, markdown_table
from hf_memmix.training.experiments.common.averages import SPREAD_NOTE
from hf_memmix.training.experiments.common.harness import measured_at
from hf_memmix.training.experiments.common.report import mean_of_rows
from hf_memmix.training.experiments.recall_teacher.probing import PROBES
from hf_memmix.training.experiments.recall_teacher.raised_report import tokens_read
from hf_memmix.training.experiments.recall_teacher.report import groups, share_text, tokens_of

CELLS = (("niah", 256), ("niah", 1024), ("niah", 2048), ("mqar_32", 1024), ("mqar_32", 2048))
STUDENTS = {  # (kept layers, how they were chosen, layout) in the grid
    "`gka`, 3 layers keep attention, chosen by `memmix select`": (3, "select", "gka"),
    "`gka`, 1 layer, chosen in the same way": (1, "select", "gka"),
    "`gka`, none": (0, "uniform", "gka"),
    "only the last 64 tokens (control), 3 layers, chosen": (3, "select", "window-64"),
    "only the last 64 tokens (control), none": (0, "uniform", "window-64"),
}
AFTER = "`gka`, none"  # the students of `raised.py` stand below this one
RAISED = {
    "raised_gla": "`gka` without its ridge regression, none, trained to recall",
    "raised_lattice": "`lattice`, none, trained to recall",
    "raised_mamba2": "`mamba2`, none, trained to recall",
    "raised": "`gka`, none, trained to recall",
    "raised_long": "`gka`, none, trained to recall",
}


def summary_table(grid: dict, raised: dict[str, dict]) -> str:
    """The teacher, students of `grid.py`, and those of `raised.py` that were trained for longer.

    raised: by the names in `RAISED`.
    """
    commits = dict.fromkeys(raised[run]["environment"]["commit"] for run in RAISED)
    head = [
        "student",
        "state",
        "training tokens",
        "perplexity ratio",
        *(f"{PROBES[task][2]}, {n}" for task, n in CELLS),
    ]
    teacher = [row for row in grid["rows"] if row["stage"] == "teacher" and "recall" in row]
    lines = [["the transformer", "grows", "", "1", *_shares(teacher)]]
    for name, key in STUDENTS.items():
        rows = groups(grid).get(key, [])
        ratio = mean_of_rows(rows, "heldout_ppl_ratio", 3).removesuffix(" (1 seed)")
        state = bytes_text(rows[0]["state_bytes"]) if rows else ""
        lines.append([name, state, f"{tokens_of(grid) / 1e6:.1f}M", ratio, *_shares(rows)])
        if name == AFTER:
            for run, title in RAISED.items():
                ratio = f"{raised[run]['heldout_ppl_ratio']:.3f}"
                state = bytes_text(raised[run]["state_bytes"])
                lines.append([title, state, f"{tokens_read(raised[run]) / 1e6:.1f}M", ratio, *_shares([raised[run]])])
    return (
        f"{markdown_table(head, lines, figures=True)}\n\nExact answers in % by the length of the context in tokens."
        " State: what does not grow with the context, of all layers together; the cache of kept layers comes on top."
        f" Control: attention over the last 64 tokens in all layers that are not kept. {SPREAD_NOTE} Without it: one"
        f" seed. {measured_at(grid)}; trained to recall: {', '.join(commits)}."
    )


def _shares(rows: list[dict]) -> list[str]:
    return [share_text(rows, task, length) for task, length in CELLS]
