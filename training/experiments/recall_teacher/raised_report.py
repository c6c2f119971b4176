"""The tables and the plot of the students with a longer training, beside each other."""

from pathlib import Path

from hf_memmix.conversion.records import markdown_table
from hf_memmix.training.experiments.common.plots import Panel, draw
from hf_memmix.training.experiments.recall_teacher.report import (
    GATE_LENGTH,
    PROBES,
    SHOWN,
    mean_text,
    mebibytes,
    probe_cells,
    probe_titles,
)

# what differs from the recipe of the first student, by the names of the records
RECIPES = {"raised_plain": "no KL on answers, one rate"}
PLOTTED = "mqar_32"
RECALL = (*SHOWN, ("mqar", 1024))


def tokens_read(run: dict) -> int:
    """The tokens of all stages."""
    return sum(run[stage]["tokens"] for stage in ("align", "distill"))


def name_of(name: str, run: dict) -> str:
    """The layout of a record, what differs from the recipe, and its seed if it is not the first one."""
    settings = run["settings"]
    parts = [settings["layout"]] + ([f"seed {settings['seed']}"] if settings.get("seed") else [])
    return ": ".join([", ".join(parts), *([RECIPES[name]] if name in RECIPES else [])])


def raised_table(runs: dict[str, dict], grid: dict) -> str:
    """One line per student, with its tokens, below the teacher."""
    head = ["student", "state, MiB", "tokens, millions", "perplexity ratio", "KL", *probe_titles(RECALL)]
    teacher = [row for row in grid["rows"] if row["stage"] == "teacher" and "recall" in row]
    lines = [["teacher", "grows", "", "1", "0", *probe_cells(teacher, RECALL)]] if teacher else []
    for name, run in runs.items():
        figures = [mean_text([run], key) for key in ("heldout_ppl_ratio", "heldout_kl")]
        state, read = mebibytes(run["state_bytes"]), f"{tokens_read(run) / 1e6:.1f}"
        lines.append([name_of(name, run), state, read, *figures, *probe_cells([run], RECALL)])
    commits = dict.fromkeys(run["environment"]["commit"] for run in runs.values())
    hardware = next(iter(runs.values()))["environment"]["hardware"]
    notes = f"One recipe, written for GKA. {hardware}, commits {', '.join(commits)}."
    return f"{markdown_table(head, lines, figures=True)}\n\n{notes}"


def plot(files: list[dict], path) -> None:
    """Plot one probe in development text by the tokens of distill, one line per student."""
    lines = {}
    for run in files:
        name = f"{name_of(Path(run['settings']['record']).stem, run)}, {tokens_read(run) / 1e6:.0f}M"
        lines[name] = [(row["tokens"] / 1e6, 100 * row[PLOTTED]) for row in run["checks"] if PLOTTED in row]
    title = f"{PROBES[PLOTTED]} at {GATE_LENGTH} tokens, %"
    panel = Panel(lines, {"xlabel": "tokens of distill, millions", "title": title, "ylim": (-4, 104)})
    draw([panel], path, files[0]["environment"]["hardware"])
