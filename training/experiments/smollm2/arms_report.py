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
    lengths = [n for n in results["settings"]["lengths"] if teacher[f"{PROBE}_{n}_choice"] >= LEAST_OF_TEACHER]
    parts = [_of_kept([row for row in students if len(row["keep"]) == count], teacher, lengths) for count in counts]
    usual = min(students, key=lambda row: row["tokens"])
    several = len({row.get("seed") for row in students}) > 1
    parts.append(
        f"KL and ratio of perplexities: on held-out text and on the domain, after {usual['align']} steps of align and"
        f" {usual['distill']} of distill, {usual['tokens'] / 1e6:.1f}M tokens. Answers: generated, at 1,024 tokens."
        f" `{PROBE}`: choice in percent, of {students[0]['recall'][0]['answers']} answers, at the lengths where the"
        f" teacher has at least {100 * LEAST_OF_TEACHER:.0f} %. {'Several seeds: smallest and largest. ' * several}"
        f"{_choice(teacher, results['settings'])} {measured_at(results)}."
    )
    return "\n\n".join(parts)


def _of_kept(students: list[dict], teacher: dict, lengths: list[int]) -> str:
    """The table of the students with one number of kept layers, and which layers these are."""
    groups: dict[tuple, list[dict]] = {}
    for row in students:
        groups.setdefault((row["arm"], row["tokens"]), []).append(row)
    usual = min(tokens for _, tokens in groups)
    lines = [["teacher", "", "0", "0", "1", *_shares([teacher], lengths)]]
    for (arm, tokens), rows in groups.items():
        name = arm if tokens == usual else f"{arm}, {tokens / 1e6:.1f}M tokens"
        name = name if len(rows) == 1 else f"{name}, {len(rows)} seeds"
        figures = [_span([f"{row[figure]:.3f}" for row in rows]) for figure in FIGURES]
        lines.append([name, f"{rows[0]['state_bytes']:,}", *figures, *_shares(rows, lengths)])
    keep = students[0]["keep"]
    title = f"{len(keep)} kept layers, {layer_text(keep)}" if keep else "no kept layers"
    return markdown_table((title, *HEAD, *(f"`{PROBE}`, {n:,}" for n in lengths)), lines, figures=True)


def _shares(rows: list[dict], lengths: list[int]) -> list[str]:
    """The generated answers, and the choice by length."""
    names = ("generated_answers", *(f"{PROBE}_{length}_choice" for length in lengths))
    return [_span([f"{100 * row[name]:.0f}" for row in rows]) for name in names]


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
