"""Tables of the bundled transformer and its students."""

import json

from hf_memmix.conversion.records import CHECKOUT, markdown_table
from hf_memmix.training.experiments.bundled.versions import as_sentence
from hf_memmix.training.experiments.results import read

TASKS = {"niah": "needle", "mqar": "MQAR, full", "kv": "dictionary", "variables": "two hops"}
STUDENTS = {"`tiny_gka`": "metrics", "tiny_gka, pure": "metrics_pure"}


def bundled_recall() -> str:
    """Recall of the bundled transformer and its two students, also with unseen words, in short and full contexts."""
    first, now = read("recall_first"), read("recall_bundled")
    folder = CHECKOUT / "model_cards" / "tiny_gka"
    students = {title: json.loads((folder / f"{name}.json").read_text()) for title, name in STUDENTS.items()}
    models = {"bundled": (now, "teacher")} | {title: (found, "student") for title, found in students.items()}
    lengths = sorted({row["length"] for row in now["recall"]["words"]})
    columns = [(title, length) for title in models for length in (lengths[0], lengths[-1])]
    rows = []
    for words, more in (("words", ""), ("unseen", ", unseen words")):
        for task, title in TASKS.items():
            shares = {
                (name, row["length"]): f"{100 * row[who]:.1f}"
                for name, (found, who) in models.items()
                for row in found["recall"][words]
                if row["task"] == task
            }
            rows.append([title + more, *(shares[column] for column in columns)])
    head = ["exact answers, %", *(f"{name}, {length}" for name, length in columns)]
    ratios = ", ".join(f"{name} {found['heldout']['ppl_ratio']:.3f}" for name, found in students.items())
    most = max(row["teacher"] for row in first["recall"]["words"])
    return (
        f"{markdown_table(head, rows, figures=True)}\n\nBy tokens. Held-out perplexity: bundled"
        f" {now['heldout']['perplexity']:.2f}; the first one {first['heldout']['perplexity']:.2f}, with at most"
        f" {100 * most:.1f} % in any cell. Ratio of the students to bundled: {ratios}. One seed each; {now['samples']}"
        f" probes per length and depth; {now['environment']['hardware']}, commit {now['environment']['commit']}."
        + as_sentence(now)
    )
