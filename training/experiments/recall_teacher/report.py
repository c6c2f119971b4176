"""The tables and the plot of the recall teacher and of its students."""

import statistics

from hf_memmix.conversion.records import markdown_table
from hf_memmix.training.experiments.common.averages import spread_text
from hf_memmix.training.experiments.common.harness import measured_at
from hf_memmix.training.experiments.common.plots import Panel, draw

# titles of the probes. New words stand in no drill, but three of four may be single tokens in drills of MQAR; the
# fourth part, the unseen words, may not
PROBES = {
    "niah": "needle",
    "variables": "two hops",
    "mqar_32": "MQAR, 32 pairs",
    "mqar": "MQAR, full",
    "mqar_32_new": "MQAR, 32 pairs, new words",
    "mqar_32_unseen": "MQAR, 32 pairs, unseen words",
}
GATE_LENGTH = 1024  # tokens, at which the teacher had to reach its gate

LETTERS = {"gka": "G", "lattice": "L", "mamba2": "M", "coffee": "C", "ska": "S"}
SHOWN = (("niah", 1024), ("variables", 1024), ("mqar_32", 1024), ("mqar_32", 2048))  # (task, length)
MOST_KEPT = 3  # kept layers of the students in the table; the picture has more, and layers that are spread evenly
LONG = ", long"  # starts with long half-lives, which the table leaves out


def mean_recall(rows: list[dict], task: str, length: int, measure: str = "exact") -> float | None:
    """The mean over all answers of a task at a length; None if it was not measured."""
    some = [row for row in rows if (row["task"], row["length"]) == (task, length)]
    total = sum(row["answers"] for row in some)
    return sum(row["answers"] * row[measure] for row in some) / total if total else None


def teacher_section(results: dict) -> str:
    """The teacher's recall by length, and its gate."""
    return (
        f"{recall_by_length(results['recall'])}\n\n"
        f"Gate at {GATE_LENGTH} tokens: {'passed' if results['gate']['passed'] else 'not passed'}."
        f" {results['parameters'] / 1e6:.1f}M parameters, {results['tokens'] / 1e6:.0f}M tokens in"
        f" {results['training_seconds']:.0f} s. {results['environment']['hardware']},"
        f" commit {results['environment']['commit']}."
    )


def recall_by_length(rows: list[dict]) -> str:
    """The share of exact answers of one model: a line per probe, a column per length."""
    lengths, lines = sorted({row["length"] for row in rows}), []
    for task, name in PROBES.items():
        shares = [mean_recall(rows, task, length) for length in lengths]
        lines.append([name, *("" if share is None else f"{100 * share:.1f}" for share in shares)])
    return markdown_table(["exact answers, % at length", *map(str, lengths)], lines, figures=True)


def groups(results: dict) -> dict[tuple[int, str, str], list[dict]]:
    """The finished students by number of kept layers, choice of these layers and layout."""
    found: dict[tuple[int, str, str], list[dict]] = {}
    for row in results["rows"]:
        if row["stage"] == "distill" and row.get("finite") and "recall" in row:
            found.setdefault((row["keep"], row["how"], row["layout"]), []).append(row)
    order = {name: i for i, name in enumerate(results["settings"]["layouts"])}
    return dict(sorted(found.items(), key=lambda item: (item[0][0], item[0][1] != "uniform", order[item[0][2]])))


def share_text(rows: list[dict], task: str, length: int) -> str:
    """The mean share of exact answers over seeds, in percent; "" without rows."""
    shares = [mean_recall(row["recall"], task, length) for row in rows]
    return spread_text([None if share is None else 100 * share for share in shares], 0)


def letters_of(rows: list[dict]) -> str:
    """The mixers of the layers as letters, of each seed if the seeds differ."""
    return ", ".join(dict.fromkeys("".join(LETTERS[kind] for kind in row["types"]) for row in rows))


def largest_error(students: list[dict]) -> str:
    """The largest standard error, in points, of a share of needles of one of these students, at `GATE_LENGTH`."""
    counts = {
        sum(row["answers"] for row in student["recall"] if (row["task"], row["length"]) == ("niah", GATE_LENGTH))
        for student in students
    }
    return f"{50 / min(counts) ** 0.5:.0f}"


ONE_RATE = "One learning rate for all mixers and windows, tuned for none of them."


def error_note(students: list[dict]) -> str:
    """How exact the shares of the tables of students are."""
    return (
        f"For one seed a share of needles or two hops may be off by {largest_error(students)} points (its largest"
        " standard error)."
    )


def probe_titles(shown=SHOWN) -> list[str]:
    """The columns of recall of a table of students."""
    return [f"{PROBES[task]}, {length}" for task, length in shown]


def probe_cells(rows: list[dict], shown=SHOWN) -> list[str]:
    """The mean shares of exact answers over seeds, in percent, in the columns of `probe_titles`."""
    cells = []
    for task, length in shown:
        shares = [mean_recall(row["recall"], task, length) for row in rows]
        found = [share for share in shares if share is not None]
        cells.append(f"{100 * statistics.fmean(found):.0f}" if found else "")
    return cells


def mebibytes(count: int) -> str:
    return f"{count / 2**20:.2f}"


def mean_text(rows: list[dict], key: str) -> str:
    """The mean over seeds, in three digits."""
    return f"{statistics.fmean(row[key] for row in rows):.3f}"


def table(results: dict) -> str:
    """One line per student without kept layers or with chosen ones: quality on held-out text, and recall by length."""
    head = ["kept", "mixer", "state, MiB", "perplexity ratio", "KL", *probe_titles()]
    lines = []
    teacher = [row for row in results["rows"] if row["stage"] == "teacher" and "recall" in row]
    if teacher:
        lines.append(["all", "teacher", "grows", "1", "0", *probe_cells(teacher)])
    for (keep, how, name), rows in groups(results).items():
        if keep > MOST_KEPT or (keep and how == "uniform") or name.endswith(LONG):
            continue
        name += f": {letters_of(rows)}" if how == "mixture" else ""
        figures = [mean_text(rows, key) for key in ("heldout_ppl_ratio", "heldout_kl")]
        state = mebibytes(rows[0]["state_bytes"])
        lines.append([str(keep), name, state, *figures, *probe_cells(rows)])
    failed = [row for row in results["rows"] if row.get("error") or row.get("finite") is False]
    notes = [f"{row.get('layout')}, {row['stage']}: {row.get('error', 'the loss is not finite')}" for row in failed]
    if any(how == "mixture" for _, how, _ in groups(results)):
        notes.insert(0, f"Layers of a mixture: {', '.join(f'{letter} {name}' for name, letter in LETTERS.items())}.")
    return "\n\n".join([markdown_table(head, lines), *notes])


def tokens_of(results: dict) -> int:
    """The tokens that every student of the grid read, in align and distill."""
    own = results["settings"]
    return (own["align_steps"] + own["distill_steps"]) * own["batch_size"] * own["block_size"]


def section(results: dict) -> str:
    """The table of students, and what they were trained on."""
    own = results["settings"]
    found = groups(results)
    counts = sorted({len(rows) for rows in found.values()})
    note = (
        f"Means of {' or '.join(map(str, counts))} seeds. {own['align_steps']} steps of align and"
        f" {own['distill_steps']} of distill, {own['batch_size'] * own['block_size']} tokens each. {ONE_RATE}"
        " Exact answers in % by the length of the context."
        f" {error_note([row for rows in found.values() for row in rows])} {measured_at(results)}."
    )
    return f"{table(results)}\n\n{note}"


def plot(files: list[dict], path) -> None:
    """Plot recall against length: a row of panels per number of kept layers, a column per probe, a line per mixer."""
    (results,), found = files, groups(files[0])
    teacher = {"teacher": [row for row in results["rows"] if row["stage"] == "teacher" and "recall" in row]}
    panels, lengths = [], results["settings"]["lengths"]
    for keep in (0, 1, 3, 6):
        models = teacher | {
            name: rows for (kept, how, name), rows in found.items() if (kept, how) == (keep, "uniform")
        }
        for task, title in PROBES.items():
            lines = {}
            for name, rows in models.items():
                shares = {n: [mean_recall(row["recall"], task, n) for row in rows] for n in lengths}
                lines[name] = [(n, 100 * statistics.fmean(by)) for n, by in shares.items() if by and None not in by]
            axes = {"title": f"{title},\n{keep} layers kept", "ylim": (-4, 104), "xlabel": "tokens", "xticks": lengths}
            panels.append(Panel(lines, axes))
    draw(panels, path, f"Exact answers, %. {measured_at(results)}", columns=len(PROBES))
