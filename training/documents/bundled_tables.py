"""The tables about the candidates for the next bundled transformer: recall by length, runs, and predictions."""

from itertools import pairwise
from pathlib import Path
from statistics import median

from hf_memmix.conversion.records import markdown_table
from hf_memmix.training.bundled.demo import recall_rows
from hf_memmix.training.bundled.versions import as_sentence
from hf_memmix.training.documents.measurements import MEASUREMENTS, read

TASKS = {"niah": "needle", "mqar": "MQAR, full", "kv": "dictionary", "variables": "two hops"}
CANDIDATES = {
    "first run": "candidate_recall",
    "third run": "bundled_run_muon_recall",
    "fourth run": "bundled_run_low_recall",
}
RUNS = {"third, Muon": "muon", "third, AdamW": "adam", "fourth": "mild", "fourth, half rates": "low"}
OPEN = (
    (7, "the student", ""),
    (13, "more drills with AdamW", "at least +1 % perplexity"),
    (17, "the fifth run", ""),
    (18, "its students", ""),
)
Recall = dict[str, list[dict]]


def share(recall: Recall, words: str, task: str, length: int, name: str = "teacher") -> float | None:
    """Exact answers in percent; None if that length was not measured."""
    (row,) = [row for row in recall[words] if (row["task"], row["length"]) == (task, length)] or [{}]
    return None if row.get(name) is None else 100 * row[name]


def bundled_recall_table(root: Path) -> str:
    """One line per probe and model: the bundled transformer, and the candidates, two with unseen words, too."""
    bundled = read("bundled_recall", root)
    found = {run: read(name, root) for run, name in CANDIDATES.items()}
    models = [("bundled", bundled, "words"), *((run, measured, "words") for run, measured in found.items())]
    models += [(f"{run}, unseen words", found[run], "unseen") for run in ("first run", "fourth run")]
    lengths = sorted({row["length"] for row in bundled["recall"]["words"]})
    rows = [
        [title, name, *(f"{share(measured['recall'], words, task, length):.1f}" for length in lengths)]
        for task, title in TASKS.items()
        for name, measured, words in models
    ]
    head = ["exact answers, %", "model", *(f"{length} tokens" for length in lengths)]
    first = read("candidate_training", root)
    perplexities = ", ".join(f"{run} {measured['heldout']['perplexity']:.2f}" for run, measured in found.items())
    return (
        markdown_table(head, rows)
        + f"\n\nHeld-out perplexity: bundled {bundled['heldout']['perplexity']:.2f}, {perplexities}. The first "
        f"candidate read {first['tokens_seen'] / 1e6:.0f}M tokens, half of them text, in {len(first['epochs'])} "
        f"passes; pass {first['best_epoch']} was kept. {first['wall_seconds']:.0f} s on one {first['hardware']} "
        f"that other runs shared. One seed; {bundled['samples']} probes per length and depth." + as_sentence(bundled)
    )


def best_pass(run: dict) -> dict:
    """The pass whose weights were kept."""
    return run["epochs"][run["best_epoch"] - 1]


def dev_share(run: dict, task: str) -> str:
    """Exact answers at the longest length in the development text, in percent, when they were measured last."""
    measured = [row["dev_recall"][task] for row in run["epochs"] if "dev_recall" in row]
    return f"{100 * measured[-1][max(measured[-1], key=int)]:.1f}" if measured else ""


def perplexity_of(name: str, root: Path) -> str:
    """The held-out perplexity of a candidate, "" if it was not measured."""
    measured = f"bundled_run_{name}_recall"
    return f"{read(measured, root)['heldout']['perplexity']:.2f}" if measured in MEASUREMENTS else ""


def bundled_runs_table(root: Path) -> str:
    """One line per candidate of the third run and the later ones."""
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
    commits = {read(f"bundled_run_{name}_recall", root)["environment"]["commit"]: None for name in ("muon", "low")}
    return (
        markdown_table(head, rows)
        + "\n\nLosses, needles and MQAR: development text, at 1024 tokens. The two candidates of a run shared an "
        "NVIDIA H200, in both runs with other programs, too; the time of a step includes this. One seed each. "
        f"Commit {', '.join(commits)}."
    )


def step_seconds(run: dict) -> float:
    """Median seconds of a step with the longest windows, between two rows of the record within a pass."""
    begins = [row["step"] for row in run["epochs"]]
    gaps = [
        (b["seconds"] - a["seconds"]) / (b["step"] - a["step"])
        for a, b in pairwise(run["steps"])
        if a["step"] >= begins[run["arguments"]["short_epochs"] - 1]
        and not any(a["step"] < s <= b["step"] for s in begins)
    ]
    return median(gaps)


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
    """What became of the predictions in training/bundled/README.md (1 to 7: the first run)."""
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
    rows += [*later_predictions(root), *predictions_of_the_fourth_run(root)]
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
    """The rows of the predictions about the run that trained the bundled transformer on."""
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
