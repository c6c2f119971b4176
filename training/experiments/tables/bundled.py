"""Tables of the bundled transformer and its students."""

import json

from hf_memmix.conversion.records import CHECKOUT, bytes_text, markdown_table
from hf_memmix.training.demo import PROBES, recall_rows
from hf_memmix.training.experiments.bundled.versions import as_sentence
from hf_memmix.training.experiments.results import read

TASKS = {"niah": "needle", "mqar": "MQAR, full", "kv": "dictionary", "variables": "two hops"}
STUDENTS = {"`tiny_gka`": "metrics", "tiny_gka, pure": "metrics_pure"}


def demo() -> str:
    """Both models of `make demo`, side by side."""
    results = read("demo")
    quality, seconds, recall = results["quality"], results["seconds"], results["recall"]["rows"]
    pairs = list(zip(results["context_cost"]["teacher"], results["context_cost"]["student"], strict=True))
    rows = [
        ["held-out perplexity", f"{quality['teacher_ppl']:.2f}", f"{quality['student_ppl']:.2f}"],
        ["same most likely token", "", f"{100 * quality['top1_agreement']:.1f} %"],
        *recall_rows(results["recall"]),
    ]
    for pair in pairs:
        if pair[0]["context"] >= 4096:
            name = f"cache at {pair[0]['context'] // 1024}k tokens of context"
            rows.append([name, *(bytes_text(row["cache_bytes"]) for row in pair)])
    for pair in pairs:
        name = f"decode after {pair[0]['context'] // 1024}k tokens, tokens/s"
        rows.append([name, *(f"{1e3 / row['ms_per_token']:.0f}" for row in pair)])
    answers = []  # behind a share of recall, with its largest standard error
    for task, name in PROBES.items():
        counts = sorted({row["answers"] for row in recall if row["task"] == task})
        most = " to ".join(dict.fromkeys(str(count) for count in (counts[0], counts[-1])))
        answers.append(f"{name} {most} (up to {50 / counts[0] ** 0.5:.0f} points)")
    layers = f"{results['student']['converted_layers']} of {results['student']['layers']} layers"
    return (
        markdown_table(["", "transformer", f"GKA, {layers}"], rows, figures=True)
        + f"\n\n{results['hardware']}; torch {results['torch']}, transformers {results['transformers']}; "
        f"{seconds['total'] / 60:.1f} minutes in all, of which {seconds['align'] + seconds['distill']:.0f} s "
        f"are training, half of the rows drills of recall. Perplexity over {quality['tokens']:,} tokens of the "
        "held-out text; the demo's learning rates and steps were chosen on another text. Answers behind each share of "
        f"recall, and its standard error: {', '.join(answers)}." + as_sentence(results)
    )


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
