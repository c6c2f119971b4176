"""The tables about the candidate for the next bundled transformer: its recall by length, and its predictions."""

from pathlib import Path

from hf_memmix.conversion.records import markdown_table
from hf_memmix.training.bundled.demo import recall_rows
from hf_memmix.training.bundled.versions import as_sentence
from hf_memmix.training.documents.measurements import MEASUREMENTS, read

TASKS = {"niah": "needle", "mqar": "MQAR, full", "kv": "dictionary", "variables": "two hops"}
STUDENT = "candidate_student"
Recall = dict[str, list[dict]]


def share(recall: Recall, words: str, task: str, length: int, name: str = "teacher") -> float | None:
    """Exact answers in percent; None if that length was not measured."""
    (row,) = [row for row in recall[words] if (row["task"], row["length"]) == (task, length)] or [{}]
    return None if row.get(name) is None else 100 * row[name]


def bundled_recall_table(root: Path) -> str:
    """One line per probe and model: the bundled transformer, the candidate, with unseen words, and its student."""
    bundled, candidate, run = (
        read(name, root) for name in ("bundled_recall", "candidate_recall", "candidate_training")
    )
    models = [
        ("bundled", bundled["recall"], "words", "teacher"),
        ("candidate", candidate["recall"], "words", "teacher"),
        ("candidate, unseen words", candidate["recall"], "unseen", "teacher"),
    ]
    told = ""
    if STUDENT in MEASUREMENTS:
        student = read(STUDENT, root)
        models.append(("its GKA student", student["recall"], "words", "student"))
        tokens, keep = sum(stage["tokens"] for stage in student["stages"]), student["keep"]
        heldout = student["heldout"]
        told = (
            f" The student keeps the attention of layer {keep[0]}, read {tokens / 1e6:.1f}M tokens and has "
            f"{heldout['ppl_ratio']:.3f} times the candidate's perplexity."
        )
    lengths = sorted({row["length"] for row in candidate["recall"]["words"]})
    rows = []
    for task, title in TASKS.items():
        for name, recall, words, who in models:
            shares = [share(recall, words, task, length, who) for length in lengths]
            rows.append([title, name, *("" if found is None else f"{found:.1f}" for found in shares)])
    head = ["exact answers, %", "model", *(f"{length} tokens" for length in lengths)]
    return (
        markdown_table(head, rows)
        + f"\n\nHeld-out perplexity: bundled {bundled['heldout']['perplexity']:.2f}, candidate "
        f"{candidate['heldout']['perplexity']:.2f}. The candidate read {run['tokens_seen'] / 1e6:.0f}M tokens, half "
        f"of them text, in {len(run['epochs'])} passes; pass {run['best_epoch']} was kept. {run['wall_seconds']:.0f} "
        f"s on one {run['hardware']} that other runs shared. One seed; {candidate['samples']} probes per length and "
        "depth." + told + as_sentence(bundled)
    )


def bundled_demo_table(root: Path) -> str:
    """What the demo shows if the candidate takes the place of the bundled transformer."""
    results = read("demo_candidate", root)
    quality, stages = results["quality"], {stage["stage"]: stage["steps"] for stage in results["stages"]}
    layers = f"{results['student']['converted_layers']} of {results['student']['layers']} layers"
    rows = [["held-out perplexity", f"{quality['teacher_ppl']:.2f}", f"{quality['student_ppl']:.2f}"]]
    rows += [
        ["same most likely token", "", f"{100 * quality['top1_agreement']:.1f} %"],
        *recall_rows(results["recall"]),
    ]
    needles = next(row["answers"] for row in results["recall"]["rows"] if row["task"] == "niah")
    return (
        markdown_table(["", "candidate", f"GKA, {layers}"], rows)
        + f"\n\n{stages['align']} steps of `align` and {stages['distill']} of `distill`, half of the rows drills, in "
        f"{results['seconds']['align'] + results['seconds']['distill']:.0f} s on a CPU that other programs used, too. "
        f"Perplexity in windows of 256 tokens; {needles} needles per length; transformer of sha256 "
        f"{results['teacher']['sha256'][:12]}."
    )


def bundled_predictions_table(root: Path) -> str:
    """What became of the predictions in training/bundled/README.md."""
    bundled, candidate, run, context = (
        read(name, root) for name in ("bundled_recall", "candidate_recall", "candidate_training", "candidate_context")
    )
    own, theirs = candidate["recall"], bundled["recall"]

    def of(task: str, length: int, words: str = "words") -> float:
        return share(own, words, task, length)

    tokens, perplexity = run["tokens_seen"] / 1e6, candidate["heldout"]["perplexity"]
    least = {"niah": {128: 95, 256: 95, 512: 90, 1024: 80}, "mqar": {128: 90, 256: 90, 512: 80, 1024: 60}}
    worst = max(share(theirs, "words", task, length) for task in least for length in least[task])
    lost = of("niah", 256) - of("niah", 256, "unseen")
    (ratio,) = (row["ratio"] for row in context["rows"] if row["context"] == 64)
    rows = [
        [1, "tokens, M", "at least 80", f"{tokens:.0f}", tokens >= 80],
        [1, "held-out perplexity", "30 to 33", f"{perplexity:.2f}", 30 <= perplexity <= 33],
    ]
    for task, steps in least.items():
        for length, bound in steps.items():
            found = of(task, length)
            rows.append([2, f"{TASKS[task]} at {length}", f"at least {bound} %", f"{found:.1f} %", found >= bound])
    unseen, hops, lines = of("mqar", 256, "unseen"), of("variables", 1024), of("kv", 256)
    rows += [
        [3, "the bundled one, best of these", "at most 3 %", f"{worst:.1f} %", worst <= 3],
        [4, "needle at 256, unseen words lose", "at most 20 points", f"{lost:.1f} points", lost <= 20],
        [4, "MQAR at 256, unseen words", "30 to 80 %", f"{unseen:.1f} %", 30 <= unseen <= 80],
        [5, "two hops at 1024", "30 to 70 %", f"{hops:.1f} %", 30 <= hops <= 70],
        [5, "dictionary at 256", "at least 80 %", f"{lines:.1f} %", lines >= 80],
        [6, "perplexity, 64 instead of 512 tokens", "at least +2 %", f"{100 * (ratio - 1):+.1f} %", ratio >= 1.02],
    ]
    if STUDENT in MEASUREMENTS:
        recall = read(STUDENT, root)["recall"]
        for length, at_least in ((256, True), (1024, False)):
            kept = [share(recall, "words", "niah", length, name) for name in ("student", "teacher")]
            part = 100 * kept[0] / kept[1] if kept[1] else 0.0
            bound = "at least half" if at_least else "less than half"
            text = f"needles at {length} that the student keeps"
            rows.append([7, text, bound, f"{part:.0f} %", (part >= 50) == at_least])
    rows = [[*row[:-1], "right" if row[-1] else "missed"] for row in rows]
    if STUDENT not in MEASUREMENTS:
        rows.append([7, "the student", "", "", "open"])
    return markdown_table(["", "prediction", "expected", "measured", ""], rows)
