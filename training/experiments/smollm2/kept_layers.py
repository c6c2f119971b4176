"""Which layers should keep attention? Three choices before any training, at equal numbers of layers.

    python training/experiments/smollm2/kept_layers.py --teacher SMOLLM2 --domain postgresql.txt --out kept_layers.json

All other layers have a window of the teacher's own attention. "even": spread evenly, as `--keep-count` does. "one by
one": the layers whose loss alone is highest, as `memmix select` scores them. "greedy" and "greedy, backward": `memmix
select --stand-in window`, without and with --drop. Choices use the development text and probes of one seed; figures
the held-out text, a text of another domain, and probes of another seed. No student is trained.
"""

import functools
from pathlib import Path
from typing import Annotated

import typer

from hf_memmix.assets import asset_path
from hf_memmix.conversion import convert_model, report
from hf_memmix.conversion.layer_choice import LayerChoice
from hf_memmix.conversion.records import markdown_table
from hf_memmix.training.data import tokenize_files
from hf_memmix.training.evaluation.probes import TASKS, Material, draw
from hf_memmix.training.evaluation.probes.grid import DEPTHS
from hf_memmix.training.evaluation.probes.score import score
from hf_memmix.training.experiments.common.harness import Experiment, measured_at
from hf_memmix.training.experiments.common.options import Options, check_names
from hf_memmix.training.experiments.smollm2 import measuring
from hf_memmix.training.text_files import read_text, text_record


def greedy(search, count: int) -> list[int]:
    return search().run(count)["keep"]


def one_by_one(search, count: int) -> list[int]:
    """The first step backward measures each layer with a window alone."""
    backward = search(drop=True)
    alone = backward.run(backward.depth - 1)["trace"][1]["candidates"]
    return sorted(sorted(alone, key=lambda layer: -alone[layer])[:count])


def even(search, count: int) -> list[int]:
    depth = search().depth
    return LayerChoice("even", count=count).layers(depth)


def backward(search, count: int) -> list[int]:
    return search(drop=True).run(count)["keep"]


MOST_SHOWN = 8  # kept layers of the rows of the table
RULES = {"even": even, "one by one": one_by_one, "greedy": greedy, "greedy, backward": backward}


def rows_to_run(done: list[dict], args) -> list[dict]:
    return [{"rule": rule, "count": count} for rule in args.rules for count in args.counts]


def run(row: dict, args) -> dict:
    teacher = measuring.teacher_of(args.teacher)
    keep = RULES[row["rule"]](functools.partial(search_of, args), row["count"])
    student = convert_model(teacher, "window", keep, window=args.window, sinks=args.sinks)
    return {"keep": keep, "student": figures_of(student, args)}


def search_of(args, drop: bool = False):
    """The search of one direction; its file keeps what is measured, so that rules and counts share it."""
    file = args.out.with_suffix(".backward.search" if drop else ".search")
    return measuring.search_of(args, ",".join(args.tasks), drop, file)


@functools.cache
def tokens_of(text: Path, teacher: Path):
    return tokenize_files(text, measuring.tokenizer_of(teacher))


@functools.cache
def samples_of(teacher: Path, text: Path, task: str, length: int, count: int) -> list:
    material = Material(measuring.tokenizer_of(teacher), read_text(text))
    depths = DEPTHS if TASKS[task].depths else (None,)
    return [s for depth in depths for s in draw(task, material, length, depth, measuring.FIGURE_SEED, count)]


@functools.cache
def answered_by_teacher(teacher: Path, text: Path, task: str, length: int, count: int) -> dict:
    return answered(measuring.teacher_of(teacher), samples_of(teacher, text, task, length, count))


def answered(model, samples: list) -> dict:
    """The shares of right choices and of exact answers."""
    scores = score(model, samples, max(1, measuring.BATCH_TOKENS // len(samples[0].ids)), control=False)
    shares = {part: sum(getattr(s, part) for s in scores) / len(scores) for part in ("choice", "exact")}
    return shares | {"answers": len(scores)}


def figures_of(student, args) -> dict:
    """Held-out text and other domain beside the teacher's, and the answers to the probes by length."""
    found, teacher = {}, measuring.teacher_of(args.teacher)
    for name, path in (("text", args.heldout), ("domain", args.domain)):
        if path is not None:
            tokens = tokens_of(path, args.teacher)[: args.measured_tokens]
            compared = report(student, teacher, tokens, measuring.tokenizer_of(args.teacher), block_size=args.length)
            found[name] = {key: compared[key] for key in ("ppl_ratio", "kl", "top1_agreement")}
    for task in args.tasks:
        found[task] = {"student": {}, "teacher": {}}
        for length in args.lengths:
            asked = (args.teacher, args.heldout, task, length, args.samples)
            found[task]["student"][str(length)] = answered(student, samples_of(*asked))
            found[task]["teacher"][str(length)] = answered_by_teacher(*asked)
    return found


def table(results: dict) -> str:
    """One line per number of layers, up to `MOST_SHOWN`, and choice of layers, with the rules that made it."""
    settings = results["settings"]
    tasks = settings.get("tasks", ["niah", "mqar"])
    names = [{"niah": "needle", "mqar": "pairs"}.get(task, task) for task in tasks]
    domain = ["domain"] * any("domain" in row["student"] for row in results["rows"])
    head, lines, rules = ["choice", "layers", "KL", *domain, *names], [], {}
    for row in results["rows"]:
        rules.setdefault((row["count"], *row["keep"]), []).append(row["rule"])
    for row in sorted(results["rows"], key=lambda row: row["count"]):
        same = rules[row["count"], *row["keep"]]
        if row["rule"] != same[0] or row["count"] > MOST_SHOWN:
            continue
        found = row["student"]
        recalled = [" ".join(f"{s['choice']:.0%}" for s in found[t]["student"].values()) for t in tasks]
        ratios = [f"{found[text]['ppl_ratio']:.3f}" for text in domain]
        figures = [f"{found['text']['kl']:.4f}", *ratios, *recalled]
        lines.append(["; ".join(same), ", ".join(map(str, row["keep"])), *figures])
    lengths = ", ".join(map(str, settings["lengths"]))
    return (
        f"{markdown_table(head, lines, figures=True)}\n\nAll other layers read {settings['window']} tokens; no"
        f" training. {'Domain: ratio of perplexities. ' * len(domain)}{' and '.join(names).capitalize()}: choice among"
        f" the candidates at {lengths} tokens; {measured_at(results)}."
    )


class Settings(Options):
    teacher: Annotated[Path, typer.Option(help="folder of the transformer")] = asset_path("tiny_teacher")
    text: Annotated[Path, typer.Option(help="text of the choices")] = asset_path("dev.txt")
    heldout: Annotated[Path, typer.Option(help="text of the figures")] = asset_path("heldout.txt")
    domain: Annotated[Path | None, typer.Option(help="text of another domain")] = None
    rules: Annotated[list[str], typer.Option(help="choices to compare; repeatable")] = tuple(RULES)
    counts: Annotated[list[int], typer.Option(help="numbers of kept layers; repeatable")] = (4, 6, 8, 10)
    window: Annotated[int, typer.Option(help="tokens of the windows")] = 64
    sinks: Annotated[int, typer.Option(help="first tokens that the windows read as well")] = 0
    length: Annotated[int, typer.Option(help="tokens of a sequence of the choices")] = 1024
    lengths: Annotated[list[int], typer.Option(help="lengths of the probes; repeatable")] = (256, 512, 1024, 2048)
    tasks: Annotated[list[str], typer.Option(help="probes of the choices and the figures; repeatable")] = (
        "niah",
        "mqar",
    )
    samples: Annotated[int, typer.Option(help="sequences per length and depth of a probe")] = 16
    measured_tokens: Annotated[int, typer.Option(help="tokens of each text that are read")] = 32768
    choice_samples: Annotated[int, typer.Option(help="sequences per depth of a probe of the choices")] = 16
    choice_tokens: Annotated[int, typer.Option(help="tokens of the text of the choices")] = 32768


def check(args) -> None:
    check_names("--rules", args.rules, RULES)
    check_names("--tasks", args.tasks, TASKS)


def about(args) -> dict:
    """What was measured on what, without the places on this machine."""
    texts = {name: getattr(args, name) for name in ("text", "heldout", "domain")}
    return {
        "model": measuring.model_record(args.teacher),
        "texts": {name: text_record(path) for name, path in texts.items() if path is not None},
    }


main = Experiment("kept_layers", __file__, Settings, rows_to_run, check, about).command()

if __name__ == "__main__":
    typer.run(main)
