"""Tables of the bundled transformer and its students."""

import json

from hf_memmix.conversion.records import CHECKOUT, markdown_table
from hf_memmix.training.experiments.bundled.versions import as_sentence
from hf_memmix.training.experiments.results import read

TASKS = {"niah": "needle", "mqar": "MQAR, full", "kv": "dictionary", "variables": "two hops"}
STUDENTS = {"`tiny_gka`": "metrics", "tiny_gka, pure": "metrics_pure"}


def bundled_recall() -> str:
    """Recall by length of the first bundled transformer, of today's, with unseen words, too, and its two students."""
    first, now = read("recall_first"), read("recall_bundled")
    folder = CHECKOUT / "model_cards" / "tiny_gka"
    students = {title: json.loads((folder / f"{name}.json").read_text()) for title, name in STUDENTS.items()}
    models = [("the first one", first["recall"], "words", "teacher")]
    for words, more in (("words", ""), ("unseen", ", unseen words")):
        models.append((f"bundled{more}", now["recall"], words, "teacher"))
        models += [(name + more, metrics["recall"], words, "student") for name, metrics in students.items()]
    lengths = sorted({row["length"] for row in first["recall"]["words"]})
    rows = []
    for task, title in TASKS.items():
        for name, recall, words, who in models:
            share = {row["length"]: f"{100 * row[who]:.1f}" for row in recall[words] if row["task"] == task}
            rows.append([title, name, *(share[length] for length in lengths)])
    head = ["exact answers, %", "model", *(f"{length} tokens" for length in lengths)]
    ratios = ", ".join(f"{name} {metrics['heldout']['ppl_ratio']:.3f}" for name, metrics in students.items())
    return (
        f"{markdown_table(head, rows)}\n\nHeld-out perplexity: the first one {first['heldout']['perplexity']:.2f}, "
        f"bundled {now['heldout']['perplexity']:.2f}. Ratio of the students to it: {ratios}. One seed each; "
        f"{now['samples']} probes per length and depth; {now['environment']['hardware']}, commit "
        f"{now['environment']['commit']}." + as_sentence(now)
    )
