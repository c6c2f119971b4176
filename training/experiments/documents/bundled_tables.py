"""The tables about the bundled transformer: recall by length, the runs that led to it, and the predictions."""

import json
from itertools import pairwise
from pathlib import Path
from statistics import median

from hf_memmix.conversion.records import markdown_table
from hf_memmix.training.experiments.bundled.versions import as_sentence
from hf_memmix.training.experiments.measurements import CARDS, MEASUREMENTS, read

TASKS = {"niah": "needle", "mqar": "MQAR, full", "kv": "dictionary", "variables": "two hops"}
STUDENTS = {"`tiny_gka`": "metrics", "tiny_gka, pure": "metrics_pure"}
CANDIDATES = {
    "first run": "candidate_recall",
    "third run": "bundled_run_muon_recall",
    "fourth run": "bundled_run_low_recall",
}
RUNS = {
    "third, Muon": "muon",
    "third, AdamW": "adam",
    "fourth": "mild",
    "fourth, half rates": "low",
    "fifth (bundled)": "on",
}
OPEN = ((7, "the first candidate's student", ""), (13, "more drills with AdamW", "at least +1 % perplexity"))
Recall = dict[str, list[dict]]


def share(recall: Recall, words: str, task: str, length: int, name: str = "teacher") -> float | None:
    """Exact answers in percent; None if that length was not measured."""
    (row,) = [row for row in recall[words] if (row["task"], row["length"]) == (task, length)] or [{}]
    return None if row.get(name) is None else 100 * row[name]


def students(root: Path) -> dict[str, dict]:
    """The measurements of the bundled student and of the one without attention layers, by their names in tables."""
    folder = root / CARDS / "tiny_gka"
    return {title: json.loads((folder / f"{name}.json").read_text()) for title, name in STUDENTS.items()}


def recall_by_length(models: list[tuple[str, Recall, str, str]]) -> str:
    """One line per probe and model: (name, recall, its words, whose share), exact answers by length."""
    lengths = sorted({row["length"] for row in models[0][1]["words"]})
    rows = [
        [title, name, *(f"{share(recall, words, task, length, who):.1f}" for length in lengths)]
        for task, title in TASKS.items()
        for name, recall, words, who in models
    ]
    return markdown_table(["exact answers, %", "model", *(f"{length} tokens" for length in lengths)], rows)


def bundled_recall_table(root: Path) -> str:
    """The first bundled transformer, today's, with unseen words, too, and its two students."""
    first, bundled, converted = read("first_recall", root), read("bundled_recall", root), students(root)
    models = [
        ("the first one", first["recall"], "words", "teacher"),
        ("bundled", bundled["recall"], "words", "teacher"),
    ]
    models += [(name, metrics["recall"], "words", "student") for name, metrics in converted.items()]
    models += [("bundled, unseen words", bundled["recall"], "unseen", "teacher")]
    models += [
        (f"{name}, unseen words", metrics["recall"], "unseen", "student") for name, metrics in converted.items()
    ]
    ratios = ", ".join(f"{name} {metrics['heldout']['ppl_ratio']:.3f}" for name, metrics in converted.items())
    return (
        recall_by_length(models)
        + f"\n\nHeld-out perplexity: the first one {first['heldout']['perplexity']:.2f}, bundled "
        f"{bundled['heldout']['perplexity']:.2f}. Ratio of the students to it: {ratios}. One seed each; "
        f"{bundled['samples']} probes per length and depth; {bundled['environment']['hardware']}, commit "
        f"{bundled['environment']['commit']}." + as_sentence(bundled)
    )


def bundled_candidates_table(root: Path) -> str:
    """Recall of the candidates that are not bundled, of two with unseen words, too."""
    found, first = {run: read(name, root) for run, name in CANDIDATES.items()}, read("candidate_training", root)
    models = [(run, measured["recall"], "words", "teacher") for run, measured in found.items()]
    models += [
        (f"{run}, unseen words", found[run]["recall"], "unseen", "teacher") for run in ("first run", "fourth run")
    ]
    perplexities = ", ".join(f"{run} {measured['heldout']['perplexity']:.2f}" for run, measured in found.items())
    (samples,) = {measured["samples"] for measured in found.values()}
    return (
        recall_by_length(models)
        + f"\n\nHeld-out perplexity: {perplexities}. The first candidate read {first['tokens_seen'] / 1e6:.0f}M "
        f"tokens, half of them text, in {len(first['epochs'])} passes; pass {first['best_epoch']} was kept. "
        f"{first['wall_seconds']:.0f} s on one {first['hardware']} that other runs shared. One seed; {samples} "
        "probes per length and depth."
    )


def best_pass(run: dict) -> dict:
    """The pass whose weights were kept."""
    return run["epochs"][run["best_epoch"] - 1]


def dev_share(run: dict, task: str) -> str:
    """Exact answers at the longest length in the development text, in percent, "" if they were not measured.

    They are those of the pass that was kept, or of the last one before it in which they were measured.
    """
    passes = run["epochs"][: run["best_epoch"]]
    measured = [row["dev_recall"][task] for row in passes if "dev_recall" in row]
    return f"{100 * measured[-1][max(measured[-1], key=int)]:.1f}" if measured else ""


def perplexity_of(name: str, root: Path) -> str:
    """The held-out perplexity of a candidate, "" if it was not measured."""
    measured = "bundled_recall" if name == "on" else f"bundled_run_{name}_recall"
    return f"{read(measured, root)['heldout']['perplexity']:.2f}" if measured in MEASUREMENTS else ""


def bundled_runs_table(root: Path) -> str:
    """One line per candidate of the third run and the later ones; the last one is bundled."""
    rows = []
    for title, name in RUNS.items():
        run = read(f"bundled_run_{name}", root)
        given, kept = run["arguments"], best_pass(run)
        rows.append(
            [title, "AdamW" if given["muon_lr"] is None else "Muon", given["answer_weight"], given["weight_decay"]]
            + [
                f"{len(run['epochs'])} of {given['epochs']}",
                f"{run['tokens_seen'] / 1e6:.0f}M",
                f"{step_seconds(run):.3f}",
            ]
            + [f"{kept['dev_loss']:.3f}", f"{kept['dev_answers']:.3f}"]
            + [dev_share(run, task) for task in ("niah", "mqar")]
            + [perplexity_of(name, root)]
        )
    head = ["run", "optimizer", "weight of answers", "decay", "passes", "tokens", "seconds of a step"]
    head += ["loss of text", "loss of answers", "needle, %", "MQAR, %", "held-out perplexity"]
    measured = ("bundled_run_muon_recall", "bundled_run_low_recall", "bundled_recall")
    commits = [read(name, root)["environment"]["commit"] for name in measured]
    return (
        markdown_table(head, rows)
        + "\n\nLosses, needles and MQAR: development text, at 1024 tokens. The two candidates of the third and of "
        "the fourth run shared an NVIDIA H200, with other programs, too, and the fifth run had one for itself; the "
        "time of a step includes this. The fourth run trains the first bundled transformer on, and the fifth run the "
        "candidate with half rates. One seed each. "
        f"Commit {', '.join(commits)}."
    )


def step_seconds(run: dict) -> float:
    """Median seconds of a step with the longest windows, between two rows of the record within a pass."""
    begins, short = [row["step"] for row in run["epochs"]], run["arguments"]["short_epochs"]
    first = begins[short - 1] if short else 0
    gaps = [
        (b["seconds"] - a["seconds"]) / (b["step"] - a["step"])
        for a, b in pairwise(run["steps"])
        if a["step"] >= first and not any(a["step"] < s <= b["step"] for s in begins)
    ]
    return median(gaps)


def bundled_predictions_table(root: Path) -> str:
    """What became of the predictions in training/experiments/bundled/README.md (1 to 7: the first run)."""
    bundled, candidate, run, context = (
        read(name, root) for name in ("first_recall", "candidate_recall", "candidate_training", "candidate_context")
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
        [3, "the first bundled one, best of these", "at most 3 %", f"{worst:.1f} %", worst <= 3],
        [4, "needle at 256, unseen words lose", "at most 20 points", f"{lost:.1f} points", lost <= 20],
        [4, "MQAR at 256, unseen words", "30 to 80 %", f"{unseen:.1f} %", 30 <= unseen <= 80],
        [5, "two hops at 1024", "30 to 70 %", f"{hops:.1f} %", 30 <= hops <= 70],
        [5, "dictionary at 256", "at least 80 %", f"{lines:.1f} %", lines >= 80],
        [6, "perplexity, 64 instead of 512 tokens", "at least +2 %", f"{100 * (ratio - 1):+.1f} %", ratio >= 1.02],
    ]
    rows += [*later_predictions(root), *predictions_of_the_fourth_run(root), *predictions_of_the_fifth_run(root)]
    rows = [[*row[:-1], {True: "right", False: "missed", None: "open"}[row[-1]]] for row in rows]
    for number, what, expected in OPEN:
        rows.append([number, what, expected, "", "open"])
    rows.sort(key=lambda row: row[0])
    return markdown_table(["", "prediction", "expected", "measured", ""], rows)


def later_predictions(root: Path) -> list[list]:
    """The rows of the predictions that are read off the third run; the last field is None if one stays open."""
    muon, adam = (read(f"bundled_run_{name}", root) for name in ("muon", "adam"))
    own, other = (read(f"bundled_run_{name}_recall", root)["recall"] for name in ("muon", "adam"))
    kept = [best_pass(run) for run in (muon, adam)]
    perplexity = muon["heldout"]["perplexity"]

    def of(recall: Recall, task: str) -> float:
        return share(recall, "words", task, 1024)

    needle, mqar, hops = (of(own, task) for task in ("niah", "mqar", "variables"))
    gap, answers = (kept[1][key] - kept[0][key] for key in ("dev_loss", "dev_answers"))
    passes, seconds = min(len(run["epochs"]) for run in (muon, adam)), max(step_seconds(run) for run in (muon, adam))
    return [
        [8, "held-out perplexity", "31 to 36", f"{perplexity:.2f}", 31 <= perplexity <= 36],
        [8, "needle at 1024", "at least 98 %", f"{needle:.1f} %", needle >= 98],
        [8, "MQAR, full at 1024", "at least 95 %", f"{mqar:.1f} %", mqar >= 95],
        [8, "two hops at 1024", "at least 30 %", f"{hops:.1f} %", hops >= 30],
        [9, "AdamW, needle at 1024", "at least 95 %", f"{of(other, 'niah'):.1f} %", of(other, "niah") >= 95],
        [9, "loss of text, AdamW less Muon", "below 0", f"{gap:+.3f}", gap < 0],
        [9, "loss of answers, AdamW less Muon", "above 0", f"{answers:+.3f}", answers > 0],
        [10, "passes", "at least 28", passes, passes >= 28],
        [10, "seconds of a step with three candidates", "at most 0.04", f"{seconds:.3f} with two", None],
        [11, "held-out perplexity", "29 to 32", f"{perplexity:.2f}", 29 <= perplexity <= 32],
        [11, "needle at 1024", "at least 98 %", f"{needle:.1f} %", needle >= 98],
        [11, "MQAR, full at 1024", "at least 95 %", f"{mqar:.1f} %", mqar >= 95],
        [12, "loss of text, AdamW less Muon", "below 0", f"{gap:+.3f}", gap < 0],
        [
            12,
            "MQAR at 1024, AdamW less Muon",
            "below 0",
            f"{of(other, 'mqar') - mqar:+.1f} points",
            of(other, "mqar") < mqar,
        ],
    ]


def predictions_of_the_fourth_run(root: Path) -> list[list]:
    """The rows of the predictions about the run that trained the first bundled transformer on."""
    low, mild = (read(f"bundled_run_{name}", root) for name in ("low", "mild"))
    measured = read("bundled_run_low_recall", root)
    perplexity, recall = measured["heldout"]["perplexity"], measured["recall"]
    needle, mqar = (share(recall, "words", task, 1024) for task in ("niah", "mqar"))
    passes = min(len(run["epochs"]) for run in (low, mild))
    text, answers = (
        low["epochs"][passes - 1][key] - mild["epochs"][passes - 1][key] for key in ("dev_loss", "dev_answers")
    )
    seconds = max(step_seconds(run) for run in (low, mild))
    return [
        [14, "held-out perplexity", "29 to 32", f"{perplexity:.2f}", 29 <= perplexity <= 32],
        [14, "needle at 1024", "at least 98 %", f"{needle:.1f} %", needle >= 98],
        [14, "MQAR, full at 1024", "at least 93 %", f"{mqar:.1f} %", mqar >= 93],
        [15, f"loss of text after {passes} passes, half rates less the others", "below 0", f"{text:+.3f}", text < 0],
        [15, "loss of answers, the same", "above 0", f"{answers:+.3f}", answers > 0],
        [16, "seconds of a step", "at most 0.03", f"{seconds:.3f}", seconds <= 0.03],
    ]


def predictions_of_the_fifth_run(root: Path) -> list[list]:
    """The rows of the predictions about today's bundled transformer and its students."""
    bundled, (kept, pure) = read("bundled_recall", root), students(root).values()
    perplexity = bundled["heldout"]["perplexity"]
    needle, mqar = (share(bundled["recall"], "words", task, 1024) for task in ("niah", "mqar"))
    ratios = [metrics["heldout"]["ppl_ratio"] for metrics in (kept, pure)]
    found = [share(metrics["recall"], "words", "niah", 1024, "student") for metrics in (kept, pure)]
    return [
        [17, "held-out perplexity", "30.5 to 33.5", f"{perplexity:.2f}", 30.5 <= perplexity <= 33.5],
        [17, "needle at 1024", "at least 98 %", f"{needle:.1f} %", needle >= 98],
        [17, "MQAR, full at 1024", "at least 95 %", f"{mqar:.1f} %", mqar >= 95],
        [18, "one layer kept: perplexity ratio", "at most 1.03", f"{ratios[0]:.3f}", ratios[0] <= 1.03],
        [18, "one layer kept: needle at 1024", "at least 60 %", f"{found[0]:.1f} %", found[0] >= 60],
        [18, "no layer kept: perplexity ratio", "at most 1.06", f"{ratios[1]:.3f}", ratios[1] <= 1.06],
        [18, "no layer kept: needle at 1024", "at most 50 %", f"{found[1]:.1f} %", found[1] <= 50],
    ]
