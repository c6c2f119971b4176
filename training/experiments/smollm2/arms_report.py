"""The report of the arms: for each number of kept layers a table of quality and of recall by length."""

import statistics

from hf_memmix.conversion.layer_choice import layer_text
from hf_memmix.conversion.records import markdown_table
from hf_memmix.training.evaluation.probes.counted import LEAST_OF_TEACHER
from hf_memmix.training.experiments.common.harness import measured_at
from hf_memmix.training.experiments.common.plots import Panel, draw
from hf_memmix.training.experiments.smollm2 import recipe_changes
from hf_memmix.training.experiments.smollm2.few_shot import NLL
from hf_memmix.training.experiments.smollm2.measuring import FEW_SHOT

SUMS = "arithmetic"  # the task that memories alone lose
HEAD = ("KL", "ratio, domain", "tokens alike", "answers, %")
FIRST_TOKEN = ", first token"  # what all windows read; the page of the experiment says so once
WINDOW, BESIDE = "window 384" + FIRST_TOKEN, "gka + window 64" + FIRST_TOKEN
# what the front page and the picture show: kept layers, arm, and the rates behind its `@`, chosen by the loss at the
# end of training; all with drills and the usual number of tokens
SHOWN = (
    (8, WINDOW, {"rate": 0.25}),
    (4, WINDOW, {"window_rate": 0.1}),
    (2, WINDOW, {"window_rate": 0.1}),
    (4, "gka", {}),
    (4, BESIDE, {}),
    (0, WINDOW, {}),
    (0, BESIDE, {"rate": 2.0}),
)
CHANGED = ("answers", "rate", "more", *recipe_changes.CHANGES)  # of an arm, beside kept layers, seed and drills
FIGURES = ("heldout_kl", "domain_ppl_ratio")


def finished(results: dict) -> list[dict]:
    """The rows of the teacher and of the arms that are trained and measured."""
    return [row for row in results["rows"] if "same_texts" in row]


def table(results: dict) -> str:
    """The tables, and below them how they were measured."""
    teacher, *students = finished(results)
    counts = sorted({len(row["keep"]) for row in students}, reverse=True)
    # the shortest length asks for little: the windows read most of it
    probes, lengths = results["settings"]["probes"], results["settings"]["lengths"][1:]
    asked = [(probe, n) for probe in probes for n in lengths if teacher[f"{probe}_{n}_choice"] >= LEAST_OF_TEACHER]
    parts = []
    for count in counts:
        # the teacher's row stands in the first tables only
        parts.append(_of_kept([row for row in students if len(row["keep"]) == count], teacher, asked, not parts))
    usual = min(students, key=lambda row: row["tokens"])
    generated = usual["generation"]
    # unshared heads have more gates
    sizes = {row["arm"].replace(FIRST_TOKEN, ""): row["state_bytes"] for row in students if not row.get("unshare")}
    parts.append(
        f"{usual['align']} steps of align and {usual['distill']} of distill, {usual['tokens'] / 1e6:.1f}M tokens;"
        f" {students[0]['recall'][0]['answers']} answers per probe, {generated['new_tokens']} tokens behind each of"
        f" {generated['prompts']} texts. Bytes per layer:"
        f" {', '.join(f'{arm}: {size:,}' for arm, size in sizes.items())}. {measured_at(results)}."
    )
    return "\n\n".join(parts)


def shown(files: list[dict], kept: int, arm: str, changes: dict[str, float]) -> list[dict]:
    """The rows of an arm of `SHOWN`, one per seed, from the first of the files that has it; [] if none has."""
    for results in files:
        _, *students = finished(results)
        rows = [row for row in students if row["arm"] == arm and len(row["keep"]) == kept and row["drills"] == 0.5]
        rows = [row for row in rows if {n: row[n] for n in CHANGED if row.get(n) is not None} == changes]
        if found := [row for row in rows if row["tokens"] == min(one["tokens"] for one in students)]:
            return found
    return []


def plot(files: list[dict], path) -> None:
    """Plot the probes by the length of the text: the teacher and the arms of `SHOWN`."""
    lengths, lines = files[0]["settings"]["lengths"], {"teacher": finished(files[0])[:1]}
    for kept, arm, changes in SHOWN:
        if rows := shown(files, kept, arm, changes):
            lines[f"{kept} kept, {arm.replace(FIRST_TOKEN, '')}"] = rows
    panels = []
    for probe in files[0]["settings"]["probes"]:
        points = {
            name: [(n, 100 * statistics.mean(row[f"{probe}_{n}_choice"] for row in rows)) for n in lengths]
            for name, rows in lines.items()
        }
        axes = {"title": f"{probe}, % right", "xlabel": "tokens", "xscale": "log", "ylim": (0, 104)}
        panels.append(Panel(points, axes | {"xticks": lengths, "xticklabels": lengths}))
    draw(panels, path, measured_at(files[0] | {"rows": [row for rows in lines.values() for row in rows]}))


def _of_kept(students: list[dict], teacher: dict, asked: list[tuple[str, int]], first: bool) -> str:
    """The table of the students with one number of kept layers, and which layers these are."""
    groups: dict[str, list[dict]] = {}
    usual = min(row["tokens"] for row in students)
    for row in students:
        groups.setdefault(_name(row, usual), []).append(row)
    groups = {name if len(rows) == 1 else f"{name}, {len(rows)} seeds": rows for name, rows in groups.items()}
    names = [f"{probe}_{length}_choice" for probe, length in asked]
    lines = [["teacher", "0", "1", "", *_shares([teacher], names), *_examples([teacher])]] if first else []
    for name, rows in groups.items():
        figures = [_span([f"{row[figure]:.3f}" for row in rows]) for figure in FIGURES]
        figures.append(_span([f"{row['generation']['median']:.0f}" for row in rows]))
        lines.append([name, *figures, *_shares(rows, names), *_examples(rows)])
    keep = students[0]["keep"]
    title = f"{len(keep)} kept layers, {layer_text(keep)}" if keep else "no kept layers"
    columns = [f"`{probe}`, {n:,}" for probe, n in asked] + ["sums", "tasks"] * bool(_tasks(teacher))
    parts = [markdown_table((title, *HEAD, *columns), lines, figures=True)]
    # kept layers read all tokens, so what they recall hardly depends on the distance
    return "\n\n".join(
        [*parts, *([] if keep else _far(title, {n for _, n in asked}, {"teacher": [teacher]} | groups))]
    )


def _name(row: dict, usual: int) -> str:
    """An arm, and what it has in place of the common settings beside kept layers and seed."""
    changes = [f"{row['tokens'] / 1e6:.1f}M tokens"] if row["tokens"] != usual else []
    if row.get("drills"):
        changes.append("drills" if row["drills"] == 0.5 else f"drills {row['drills']:.0%}")
    for name in CHANGED:
        if row.get(name) is not None:
            changes.append("more sentences" if name == "more" else f"{name} {row[name]:g}")
    return ", ".join([row["arm"].replace(FIRST_TOKEN, ""), *changes])


def _far(title: str, lengths: set[int], groups: dict[str, list[dict]]) -> list[str]:
    """A table of what is recalled from outside every window, if that was measured, where the teacher recalls it."""
    (teacher,) = groups["teacher"]
    figures = [f"{probe}_{n}_far" for n in sorted(lengths) for probe in ("fact", "pairs", "drilled")]
    figures = [name for name in figures if teacher.get(name, 0) >= LEAST_OF_TEACHER]
    figures = [name for name in figures if all(name in row for rows in groups.values() for row in rows)]
    if not figures or len(groups) < 3:  # beside the teacher, one arm is no comparison
        return []
    lines = [[n, *(_span([f"{100 * row[at]:.0f}" for row in rows]) for at in figures)] for n, rows in groups.items()]
    probes = (figure.split("_")[:2] for figure in figures)
    head = (f"{title}, far", *(f"`{probe}`, {int(length):,}" for probe, length in probes))
    return [markdown_table(head, lines, figures=True)]


def _examples(rows: list[dict]) -> list[str]:
    """Percent of exact sums, and the mean of the tasks of few_shot.py; [] if they were not measured."""
    if not _tasks(rows[0]):
        return []
    sums = _span([f"{100 * row[FEW_SHOT + SUMS]:.0f}" for row in rows])
    return [sums, _span([f"{100 * mean_of_tasks(row):.1f}" for row in rows])]


def mean_of_tasks(row: dict) -> float:
    """The share of exact answers, on the mean of the tasks of few_shot.py."""
    return statistics.mean(row[FEW_SHOT + task] for task in _tasks(row))


def _tasks(teacher: dict) -> list[str]:
    """The tasks of few_shot.py that were measured."""
    names = (name.removeprefix(FEW_SHOT) for name in teacher if name.startswith(FEW_SHOT))
    return [name for name in names if not name.endswith(NLL)]


def _shares(rows: list[dict], names: list[str]) -> list[str]:
    """The generated answers and other figures in percent."""
    return [_span([f"{100 * row[name]:.0f}" for row in rows]) for name in ("generated_answers", *names)]


def _span(values: list[str]) -> str:
    low, high = min(values, key=float), max(values, key=float)
    return low if low == high else f"{low} to {high}"
