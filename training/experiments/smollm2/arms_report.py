"""The report of the arms: the quality of every student beside its size, then what it recalls by length."""

from hf_memmix.conversion.layer_choice import layer_text
from hf_memmix.conversion.records import markdown_table
from hf_memmix.training.evaluation.probes.counted import LEAST_OF_TEACHER, shares_text
from hf_memmix.training.experiments.common.harness import measured_at

HEAD = ("arm", "bytes per layer", "KL", "domain", "ratio", "domain", "same token, %", "domain", "answers, %")
HEAD = (*HEAD, "same texts, %", "error before training")
TEXTS = ("heldout", "domain")
SHARES = ("heldout_top1_agreement", "domain_top1_agreement", "generated_answers", "same_texts")


def finished(results: dict) -> list[dict]:
    """The rows of the teacher and of the arms that are trained and measured."""
    return [row for row in results["rows"] if "same_texts" in row]


def table(results: dict) -> str:
    """The tables of quality and of recall."""
    teacher, *students = finished(results)
    return f"{_quality(results, [teacher, *students])}\n\n{_recall(results, students)}"


def _quality(results: dict, rows: list[dict]) -> str:
    lines = []
    for row in rows:
        ratios = [f"{row[f'{text}_{name}']:.3f}" for name in ("kl", "ppl_ratio") for text in TEXTS]
        shares = [f"{100 * row[name]:.0f}" for name in SHARES]
        trained = "align_run" in row
        size = f"{row['state_bytes']:,}" if trained else ""
        lines.append([row["arm"], size, *ratios, *shares, f"{row['align_run']['first_loss']:.3f}" if trained else ""])
    teacher, *students = rows
    first, *steps = teacher["choice"]["trace"]
    order = ", ".join(f"{row['layer']} ({row['loss']:.2f})" for row in steps)
    windows = f"`window={results['settings']['window']}`, `sinks={results['settings'].get('sinks', 0)}`"
    keep = layer_text(teacher["choice"]["keep"])
    return (
        f"{markdown_table(HEAD, lines, figures=True)}\n\nKept: {keep}, chosen with {windows} in place of all others;"
        f" their loss is {first['loss']:.2f}, with a KL of {first['kl']:.2f}, and after each layer that gets its"
        f" attention back: {order}. Steps of align and distill: {students[0]['align']} and {students[0]['distill']},"
        f" {students[0]['tokens'] / 1e6:.1f}M tokens; one seed, one rate. {measured_at(results)}."
    )


def _recall(results: dict, students: list[dict]) -> str:
    lines = []
    for task in dict.fromkeys(cell["task"] for cell in students[0]["recall"]):
        own = [[cell for cell in row["recall"] if cell["task"] == task] for row in students]
        lines.append([task, "teacher", *(shares_text(cell, "teacher") for cell in own[0])])
        for row, cells in zip(students, own, strict=True):
            lines.append([task, row["arm"], *(shares_text(cell, "student") for cell in cells)])
    head, answers = ("probe", "arm", *results["settings"]["lengths"]), students[0]["recall"][0]["answers"]
    return (
        f"{markdown_table(head, lines, figures=True)}\n\nChoice / exact in percent, by length, of {answers} answers"
        f" each. A star: the teacher itself is below {100 * LEAST_OF_TEACHER:.0f} %, so this does not count."
    )
