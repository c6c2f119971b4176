"""The tables and the plots of the recall teacher and of its students."""

import statistics
from pathlib import Path

from hf_memmix.conversion.records import bytes_text, markdown_table
from hf_memmix.training.experiments.common.averages import spread_text
from hf_memmix.training.experiments.common.harness import measured_at
from hf_memmix.training.experiments.common.plots import MARKERS, figure_of, pyplot_without_screen, save
from hf_memmix.training.experiments.recall_teacher.probing import GATE_LENGTH, PROBES, mean_recall

LETTERS = {"gka": "G", "lattice": "L", "mamba2": "M", "coffee": "C", "ska": "S"}
WINDOW = {"window": "W"}  # attention over the last tokens: a control, no mixer
SHOWN = (("niah", 1024), ("niah", 2048), ("variables", 1024), ("mqar_32", 1024), ("mqar_32", 2048), ("mqar", 1024))
MIXED = {  # layouts of several mixers, and the layouts of one kind that they are compared with
    "select, bytes of gka": ("gka",),
    "select, bytes of lattice": ("lattice", "window-64"),
    "echo": ("mamba2", "ska"),
}


def teacher_section(results: dict) -> str:
    """The teacher's recall by length, its gate, its losses and how much its context counts."""
    gate = results["gate"]
    verdicts = [
        f"{PROBES[task][2]} {100 * part['exact']:.1f} % of at least {100 * part['least']:.0f} %"
        for task, part in gate.items()
        if isinstance(part, dict)
    ]
    contexts = [[text, *(f"{row['loss']:.3f}" for row in rows)] for text, rows in results["context_use"].items()]
    head = [f"after {row['context']} tokens" for row in next(iter(results["context_use"].values()))]
    return "\n\n".join(
        [
            recall_by_length(results["recall"]),
            f"Gate at {GATE_LENGTH} tokens: {'; '.join(verdicts)}: {'passed' if gate['passed'] else 'not passed'}.",
            markdown_table(["loss, nats per token", *head], contexts, figures=True),
            f"{results['parameters'] / 1e6:.1f}M parameters, {results['tokens'] / 1e6:.0f}M tokens in"
            f" {results['training_seconds']:.0f} s. {results['environment']['hardware']},"
            f" commit {results['environment']['commit']}.",
        ]
    )


def recall_by_length(rows: list[dict]) -> str:
    """The share of exact answers of one model: a line per probe, a column per length."""
    lengths, lines = sorted({row["length"] for row in rows}), []
    for task, (_, _, name) in PROBES.items():
        shares = [mean_recall(rows, task, length) for length in lengths]
        lines.append([name, *("" if share is None else f"{100 * share:.1f}" for share in shares)])
    return markdown_table(["exact answers, % at length", *map(str, lengths)], lines, figures=True)


def raised_section(results: dict) -> str:
    """The recall of the student of `raised.py` by length, its quality, and its recall on the way."""
    head, names = ["million tokens of distill"], [task for task in PROBES if task in (results["checks"] or [{}])[0]]
    checks = [
        [f"{row['tokens'] / 1e6:.1f}", *(f"{100 * row[task]:.0f}" for task in names)] for row in results["checks"]
    ]
    head += [f"{PROBES[task][2]} at {results['settings']['gate_length']}, %" for task in names]
    stages = [f"{results[stage]['tokens'] / 1e6:.1f}M tokens of {stage}" for stage in ("align", "distill")]
    figures = f"Perplexity ratio {results['heldout_ppl_ratio']:.3f}, KL {results['heldout_kl']:.3f} on held-out text"
    where = results["environment"]
    return "\n\n".join(
        [
            recall_by_length(results["recall"]),
            f"{figures}. `{results['settings']['layout']}` without kept layers, state"
            f" {bytes_text(results['state_bytes'])}; {' and '.join(stages)}. {where['hardware']}, commit"
            f" {where['commit']}.",
            "On the way, in development text:",
            markdown_table(head, checks, figures=True),
        ]
    )


def plot_raised(results: dict, path: str | Path) -> None:
    """Plot recall in development text by the tokens of distill, one line per probe."""
    figure, (panel,) = figure_of(1, f"{results['settings']['layout']}, commit {results['environment']['commit']}")
    for place, task in enumerate(task for task in PROBES if task in (results["checks"] or [{}])[0]):
        points = [(row["tokens"] / 1e6, 100 * row[task]) for row in results["checks"]]
        panel.plot(*zip(*points, strict=True), marker=MARKERS[place % len(MARKERS)], ms=4, label=PROBES[task][2])
    panel.set(xlabel="tokens of distill, millions", ylabel="exact answers, %", ylim=(-4, 104))
    figure.legend(loc="outside upper center", ncols=3, fontsize=7, frameon=False)
    save(figure, path)


def plot_teacher(results: dict, path: str | Path) -> None:
    """Plot the losses of the teacher's training by tokens."""
    figure, (panel,) = figure_of(1, f"commit {results['environment']['commit']}")
    for name in ("text", "answers"):
        panel.plot([r["tokens"] / 1e6 for r in results["curve"]], [r[name] for r in results["curve"]], label=name)
    panel.set(xlabel="tokens, millions", ylabel="training loss, nats per token")
    panel.legend(fontsize=8, frameon=False)
    save(figure, path)


def groups(results: dict) -> dict[tuple[int, str, str], list[dict]]:
    """The finished students by number of kept layers, choice of these layers and layout."""
    found: dict[tuple[int, str, str], list[dict]] = {}
    for row in results["rows"]:
        if row["stage"] == "distill" and row.get("finite") and "recall" in row:
            found.setdefault((row["keep"], row["how"], row["layout"]), []).append(row)
    order = {name: i for i, name in enumerate(results["settings"]["layouts"])}
    return dict(sorted(found.items(), key=lambda item: (item[0][0], item[0][1] != "uniform", order[item[0][2]])))


def _with(teacher: list[dict]) -> dict[str, list[dict]]:
    return {"teacher": teacher} if teacher else {}


def share_text(rows: list[dict], task: str, length: int) -> str:
    """The mean share of exact answers over seeds, in percent; "" without rows."""
    shares = [mean_recall(row["recall"], task, length) for row in rows]
    return spread_text([None if share is None else 100 * share for share in shares], 0)


def letters_of(rows: list[dict]) -> str:
    """The mixers of the layers as letters, of each seed if the seeds differ."""
    return ", ".join(dict.fromkeys("".join((LETTERS | WINDOW)[kind] for kind in row["types"]) for row in rows))


def probe_titles() -> list[str]:
    """The columns of recall of both tables of students."""
    return [f"{PROBES[task][2]}, {length}" for task, length in SHOWN]


def probe_cells(rows: list[dict]) -> list[str]:
    """The mean shares of exact answers over seeds, in percent, in the columns of `probe_titles`."""
    cells = []
    for task, length in SHOWN:
        shares = [mean_recall(row["recall"], task, length) for row in rows]
        found = [share for share in shares if share is not None]
        cells.append(f"{100 * statistics.fmean(found):.0f}" if found else "")
    return cells


def mean_text(rows: list[dict], key: str) -> str:
    """The mean over seeds, in three digits."""
    return f"{statistics.fmean(row[key] for row in rows):.3f}"


def table(results: dict) -> str:
    """One line per student: quality on held-out text, and recall by length."""
    head = ["kept", "layers", "mixer", "state", "perplexity ratio", "KL", *probe_titles()]
    lines = []
    teacher = [row for row in results["rows"] if row["stage"] == "teacher" and "recall" in row]
    if teacher:
        lines.append(["all", "", "teacher", "grows", "1", "0", *probe_cells(teacher)])
    for (keep, how, name), rows in groups(results).items():
        layers = letters_of(rows) if how == "mixture" else how if keep else ""
        figures = [mean_text(rows, key) for key in ("heldout_ppl_ratio", "heldout_kl")]
        state = bytes_text(rows[0]["state_bytes"])
        lines.append([str(keep), layers, name, state, *figures, *probe_cells(rows)])
    failed = [row for row in results["rows"] if row.get("error") or row.get("finite") is False]
    notes = [f"{row.get('layout')}, {row['stage']}: {row.get('error', 'the loss is not finite')}" for row in failed]
    if any(how == "mixture" for _, how, _ in groups(results)):
        notes.insert(0, f"Layers of a mixture: {', '.join(f'{letter} {name}' for name, letter in LETTERS.items())}.")
    return "\n\n".join([markdown_table(head, lines), *notes])


def mixtures_table(results: dict) -> str:
    """Students of several mixers, each below the students of one mixer or window that it is compared with."""
    head = ["students", "layers", "state", "perplexity ratio", "KL"]
    head += [f"{PROBES[task][2]} at {GATE_LENGTH}, %" for task, length in SHOWN if length == GATE_LENGTH] + ["seeds"]
    found, lines = groups(results), []
    for layout, others in MIXED.items():
        if not (mixed := found.get((0, "mixture", layout))):
            continue
        for name, rows in [*((other, found.get((0, "uniform", other), [])) for other in others), (layout, mixed)]:
            if not rows:
                continue
            figures = [mean_text(rows, key) for key in ("heldout_ppl_ratio", "heldout_kl")]
            shares = [
                cell for cell, (_, length) in zip(probe_cells(rows), SHOWN, strict=True) if length == GATE_LENGTH
            ]
            lines.append(
                [name, letters_of(rows), bytes_text(rows[0]["state_bytes"]), *figures, *shares, str(len(rows))]
            )
    letters = ", ".join(f"{letter} {name}" for name, letter in (LETTERS | WINDOW).items())
    letters += " (attention over the last 64 tokens, a control)"
    note = f"{letters}. Means over seeds; every student was trained on {tokens_of(results) / 1e6:.1f}M tokens."
    return f"{markdown_table(head, lines)}\n\n{note} {measured_at(results)}."


def tokens_of(results: dict) -> int:
    """The tokens that every student of the grid read, in align and distill."""
    own = results["settings"]
    return (own["align_steps"] + own["distill_steps"]) * own["batch_size"] * own["block_size"]


def section(results: dict) -> str:
    """The table of students, and what they were trained on."""
    own = results["settings"]
    counts = sorted({len(rows) for rows in groups(results).values()})
    note = (
        f"Means of {' or '.join(map(str, counts))} seeds. {own['align_steps']} steps of align and"
        f" {own['distill_steps']} of distill, {own['batch_size'] * own['block_size']} tokens each. One learning rate"
        " for all mixers and windows, tuned for none of them. Exact answers in % by the length of the context; a share"
        " of needles or two hops is of 40 answers for each seed, so its standard error is up to 8 points."
        f" {measured_at(results)}."
    )
    return f"{table(results)}\n\n{note}"


def plot(results: dict, path: str | Path) -> None:
    """Plot recall against length: a row of panels per number of kept layers, a column per probe, a line per mixer."""
    found = groups(results)
    teacher = _with([row for row in results["rows"] if row["stage"] == "teacher" and "recall" in row])
    keeps = [keep for keep in (0, 1, 3, 6) if any(key[:2] == (keep, "uniform") for key in found)]
    tasks = [t for t in PROBES if any(c["task"] == t for rows in found.values() for r in rows for c in r["recall"])]
    if not keeps or not tasks:
        return
    figure, axes = pyplot_without_screen().subplots(
        len(keeps), len(tasks), figsize=(3.6 * len(tasks), 3.4 * len(keeps)), squeeze=False, constrained_layout=True
    )
    places = {name: place for place, name in enumerate(dict.fromkeys([*teacher, *(name for _, _, name in found)]))}
    shown = {}
    for keep, panels in zip(keeps, axes, strict=True):
        lines = teacher | {name: rows for (k, how, name), rows in found.items() if (k, how) == (keep, "uniform")}
        for task, panel in zip(tasks, panels, strict=True):
            for name, rows in lines.items():
                points, place = {}, places[name]
                for length in results["settings"]["lengths"]:
                    shares = [mean_recall(row["recall"], task, length) for row in rows]
                    if shares := [100 * share for share in shares if share is not None]:
                        points[length] = statistics.fmean(shares)
                style = {"marker": MARKERS[place % len(MARKERS)], "color": f"C{place % 10}", "ms": 4}
                style["linestyle"] = "-" if place < 10 else "--"  # there are ten colours
                (shown[name],) = panel.plot(list(points), list(points.values()), **style)
            kept = f"{keep} layer{'s' * (keep > 1)} kept" if keep else "no layer kept"
            panel.set_title(f"{PROBES[task][2]},\n{kept}", fontsize=10)  # in two lines: panels are narrow
            panel.set_ylim(-4, 104)
            panel.set(xlabel="tokens", ylabel="exact answers, %", xticks=results["settings"]["lengths"])
            panel.grid(alpha=0.3)
    figure.legend(shown.values(), shown.keys(), loc="outside right upper", fontsize=9, frameon=False)
    figure.supxlabel(measured_at(results), fontsize=8, color="#555555")
    save(figure, path)
