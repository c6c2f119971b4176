"""The report of the arms: for each number of kept layers a table of quality and of recall by length."""

from hf_memmix.conversion.layer_choice import layer_text
from hf_memmix.conversion.records import markdown_table
from hf_memmix.training.evaluation.probes.counted import LEAST_OF_TEACHER
from hf_memmix.training.experiments.common.harness import measured_at

HEAD = ("bytes per layer", "KL", "domain", "ratio, domain", "answers, %")
FIGURES = ("heldout_kl", "domain_kl", "domain_ppl_ratio")
PROBE = "fact"


def finished(results: dict) -> list[dict]:
    """The rows of the teacher and of the arms that are trained and measured."""
    return [row for row in results["rows"] if "same_texts" in row]


def table(results: dict) -> str:
    """The tables, and below them how the kept layers were chosen."""
    teacher, *students = finished(results)
    counts = sorted({len(row["keep"]) for row in students}, reverse=True)
    parts = [_of_kept([row for row in students if len(row["keep"]) == count], teacher, results) for count in counts]
    answers = students[0]["recall"][0]["answers"]
    parts.append(
        "KL and ratio of perplexities: on held-out text and on the domain. Answers: generated, at 1,024 tokens."
        f" `{PROBE}` by length: choice in percent, of {answers} answers; a star: the teacher itself is below"
        f" {100 * LEAST_OF_TEACHER:.0f} %, so this does not count. Several seeds: smallest and largest."
        f" {_choice(teacher, results['settings'])} {measured_at(results)}."
    )
    return "\n\n".join(parts)


def _of_kept(students: list[dict], teacher: dict, results: dict) -> str:
    """The table of the students with one number of kept layers, and which layers these are."""
    lengths, groups = results["settings"]["lengths"], {}
    for row in students:
        groups.setdefault((row["arm"], row["tokens"]), []).append(row)
    usual = min(tokens for _, tokens in groups)
    lines = [["teacher", "", "0", "0", "1", *_shares([teacher], lengths, teacher)]]
    for (arm, tokens), rows in groups.items():
        name = arm if tokens == usual else f"{arm}, {tokens / 1e6:.1f}M tokens"
        name = name if len(rows) == 1 else f"{name}, {len(rows)} seeds"
        figures = [_span([f"{row[figure]:.3f}" for row in rows]) for figure in FIGURES]
        lines.append([name, f"{rows[0]['state_bytes']:,}", *figures, *_shares(rows, lengths, teacher)])
    keep = students[0]["keep"]
    title = f"{len(keep)} kept layers, {layer_text(keep)}" if keep else "no kept layers"
    head = (title, *HEAD, *(f"`{PROBE}`, {length:,}" for length in lengths))
    steps = next(row for row in students if row["tokens"] == usual)
    return (
        f"{markdown_table(head, lines, figures=True)}\n\nSteps of align and distill: {steps['align']} and"
        f" {steps['distill']}, {usual / 1e6:.1f}M tokens."
    )


def _shares(rows: list[dict], lengths: list[int], teacher: dict) -> list[str]:
    """The generated answers, and the choice by length."""
    cells = [_span([f"{100 * row['generated_answers']:.0f}" for row in rows])]
    for length in lengths:
        name = f"{PROBE}_{length}_choice"
        star = "" if teacher[name] >= LEAST_OF_TEACHER else "*"
        cells.append(_span([f"{100 * row[name]:.0f}" for row in rows]) + star)
    return cells


def _span(values: list[str]) -> str:
    low, high = min(values, key=float), max(values, key=float)
    return low if low == high else f"{low} to {high}"


def _choice(teacher: dict, settings: dict) -> str:
    first, *steps = teacher["choice"]["trace"]
    order = ", ".join(f"{row['layer']} ({row['loss']:.2f})" for row in steps)
    return (
        f"Choice of kept layers: with `window={settings['window']}` and `sinks={settings.get('sinks', 0)}` in place of"
        f" all, the loss is {first['loss']:.2f}, with a KL of {first['kl']:.2f}, and after each layer that gets its"
        f" attention back: {order}."
    )
