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

HEAD = ("bytes per layer", "KL", "ratio, domain", "tokens alike", "answers, %")
FIRST_TOKEN = ", first token"  # what all windows read; the page of the experiment says so once
PLOTTED = {"window 384" + FIRST_TOKEN: "window 384", "gka": "gka", "gka + window 64" + FIRST_TOKEN: "gka, window 64"}
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
    parts.append(
        f"{usual['align']} steps of align and {usual['distill']} of distill, {usual['tokens'] / 1e6:.1f}M tokens;"
        f" {students[0]['recall'][0]['answers']} answers per probe, {generated['new_tokens']} tokens behind each of"
        f" {generated['prompts']} texts. {measured_at(results)}."
    )
    return "\n\n".join(parts)


def plot(files: list[dict], path) -> None:
    """Plot the probes by the length of the text: the arms of `PLOTTED` with drills and the usual number of tokens. An
    arm of several files is that of the first.
    """
    lengths, lines = files[0]["settings"]["lengths"], {"teacher": finished(files[0])[:1]}
    for results in files:
        _, *students = finished(results)
        usual, groups = min(row["tokens"] for row in students), {}
        for row in students:
            if row["arm"] in PLOTTED and row["drills"] and row["tokens"] == usual:
                groups.setdefault(f"{len(row['keep'])} kept, {PLOTTED[row['arm']]}", []).append(row)
        lines = groups | lines
    lines = dict(sorted(lines.items(), key=lambda line: len(line[1][0].get("keep", range(99))), reverse=True))
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
    lines = [["teacher", "", "0", "1", "", *_shares([teacher], names)]] if first else []
    for name, rows in groups.items():
        figures = [_span([f"{row[figure]:.3f}" for row in rows]) for figure in FIGURES]
        figures.append(_span([f"{row['generation']['median']:.0f}" for row in rows]))
        lines.append([name, f"{rows[0]['state_bytes']:,}", *figures, *_shares(rows, names)])
    keep = students[0]["keep"]
    title = f"{len(keep)} kept layers, {layer_text(keep)}" if keep else "no kept layers"
    columns = [f"`{probe}`, {n:,}" for probe, n in asked]
    parts = [markdown_table((title, *HEAD, *columns), lines, figures=True)]
    parts += _examples(title, teacher, {"teacher": [teacher]} | groups if first else groups)
    # kept layers read all tokens, so what they recall hardly depends on the distance
    return "\n\n".join([*parts, *([] if keep else _far(title, {"teacher": [teacher]} | groups))])


def _name(row: dict, usual: int) -> str:
    """An arm, and what it has in place of the common settings beside kept layers and seed."""
    changes = [f"{row['tokens'] / 1e6:.1f}M tokens"] if row["tokens"] != usual else []
    if row.get("drills"):
        changes.append("drills" if row["drills"] == 0.5 else f"drills {row['drills']:.0%}")
    names = ("answers", "rate", *recipe_changes.CHANGES)
    changes += [f"{name} {row[name]:g}" for name in names if row.get(name) is not None]
    changes += ["more sentences"] if row.get("more") else []
    return ", ".join([row["arm"].replace(FIRST_TOKEN, ""), *changes])


def _far(title: str, groups: dict[str, list[dict]]) -> list[str]:
    """A table of what is recalled from outside every window, if that was measured, where the teacher recalls it."""
    (teacher,) = groups["teacher"]
    figures = [name for name in teacher if name.endswith("_far") and teacher[name] >= LEAST_OF_TEACHER]
    figures = [name for name in figures if all(name in row for rows in groups.values() for row in rows)]
    if not figures:
        return []
    lines = [[n, *(_span([f"{100 * row[at]:.0f}" for row in rows]) for at in figures)] for n, rows in groups.items()]
    probes = (figure.split("_")[:2] for figure in figures)
    head = (f"{title}, far", *(f"`{probe}`, {int(length):,}" for probe, length in probes))
    return [markdown_table(head, lines, figures=True)]


def _examples(title: str, teacher: dict, groups: dict[str, list[dict]]) -> list[str]:
    """A table of the tasks with examples, if they were measured."""
    names = [FEW_SHOT + task for task in _tasks(teacher)]
    if not names:
        return []
    lines = []
    for group, rows in groups.items():
        means = [mean_of_tasks(row) for row in rows]
        nll = [statistics.mean(row[name + NLL] for name in names) for row in rows]
        exact = [_span([f"{100 * row[name]:.0f}" for row in rows]) for name in names]
        spans = _span([f"{100 * mean:.1f}" for mean in means]), _span([f"{one:.3f}" for one in nll])
        lines.append([group, *exact, *spans])
    tasks = (name.removeprefix(FEW_SHOT).replace("_", " ") for name in names)
    return [markdown_table((f"{title}, tasks", *tasks, "mean", "mean nll"), lines, figures=True)]


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
