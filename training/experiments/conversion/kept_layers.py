"""Which layers should stay attention? Compares the choice of `memmix select` with uniform spacing and all other sets.

    python training/experiments/conversion/kept_layers.py --text train.txt --out compare_plans.json --plot

The script aligns every layer of the bundled transformer once and ranks the layers on the development text. Then it
distils one student for every set of kept layers of the given sizes, from the same aligned mixers, with the same tokens
in the same order. As every set is trained, the expected result of a random choice is the mean over all sets. All
reported figures are measured on the held-out text.
"""

import itertools
import tempfile
from pathlib import Path
from typing import Annotated

import torch
import typer
from transformers import AutoTokenizer

from hf_memmix.assets import asset_path
from hf_memmix.command_options import command
from hf_memmix.conversion import convert_model, load_model, report, save_student
from hf_memmix.conversion.convert import layers_to_keep
from hf_memmix.conversion.records import markdown_table, write_json
from hf_memmix.conversion.taken_mixers import take_mixers
from hf_memmix.training.data import TokenBlocks
from hf_memmix.training.evaluation.layer_selection import cost_of_swaps, rank_layers
from hf_memmix.training.evaluation.probes import Material, draw
from hf_memmix.training.evaluation.probes.grid import DEPTHS
from hf_memmix.training.evaluation.probes.score import score
from hf_memmix.training.experiments.bundled.versions import bundled_teacher
from hf_memmix.training.experiments.common.averages import mean_and_deviation
from hf_memmix.training.experiments.common.fit import Deadline
from hf_memmix.training.experiments.common.harness import device, execute, measured_at
from hf_memmix.training.experiments.common.options import DistillationOptions, draw_if_asked
from hf_memmix.training.experiments.common.text import describe_training_text, train_tokens
from hf_memmix.training.experiments.common.text import measured_tokens as tokens_of
from hf_memmix.training.train import Recipe, train

TRAINING_TEXT = asset_path("train.txt")
TASKS, LENGTH = ("niah", "mentions"), 256
ALIGN = {"steps": 400, "learning_rate": 3e-3}
DISTILL = {"steps": 250, "learning_rate": 1e-3, "rest_learning_rate": 1e-4}
SCORES = {"select": ("kl", "nll"), "KL alone": ("kl",), "answers alone": ("nll",)}


def rows_to_run(done: list[dict], args) -> list[dict]:
    if not any(row["stage"] == "align" for row in done):
        return [{"stage": "align"}]
    layers = load_model(asset_path("tiny_teacher")).config.num_hidden_layers
    sets = [list(keep) for size in args.sizes for keep in itertools.combinations(range(layers), size)]
    return [{"stage": "distill", "keep": keep} for keep in sets]


def run(row: dict, args) -> dict:
    teacher = load_model(asset_path("tiny_teacher"), dtype=torch.float32).to(device())
    if row["stage"] == "align":
        return align(teacher, args)
    aligned = load_model(_folder(args), dtype=torch.float32).to(device())
    layers = range(teacher.config.num_hidden_layers)
    swapped = [layer for layer in layers if layer not in row["keep"]]
    base, (cost,) = cost_of_swaps(teacher, aligned, [swapped], *_read("heldout", args), batch_size=args.batch_size)
    student = convert_model(teacher, args.mixer, row["keep"])
    take_mixers(student, aligned)
    _train(student, teacher, args, "distill", DISTILL | {"steps": args.distill_steps})
    tokens = tokens_of("heldout")[: args.measured_tokens]
    compared = report(student, teacher, tokens, batch_size=args.batch_size)
    trained = {name: compared[name] for name in ("student_ppl", "ppl_ratio", "kl", "top1_agreement")}
    samples = _read("heldout", args)[1]
    scores = {task: score(student, drawn, args.batch_size, control=False) for task, drawn in samples.items()}
    trained["answers"] = {task: sum(s.nll for s in found) / len(found) for task, found in scores.items()}
    return {"teacher": base | {"ppl": compared["teacher_ppl"]}, "untrained": cost, "trained": trained}


def align(teacher, args) -> dict:
    """Align all layers, save the student for the other rows, and rank the layers on the development text."""
    student = convert_model(teacher, args.mixer, "none")
    done = _train(student, teacher, args, "align", ALIGN | {"steps": args.align_steps})
    save_student(student, _folder(args), overwrite=True)
    ranking = rank_layers(teacher, student, *_read("dev", args), batch_size=args.batch_size)
    return {"ranking": ranking, "curve": [[entry["step"], entry["loss"]] for entry in done["log"]]}


def _folder(args) -> Path:
    return args.out.with_suffix(".aligned")


def _train(student, teacher, args, stage: str, overrides: dict) -> dict:
    data = TokenBlocks(train_tokens(args.text).long(), args.block_size)
    settings = {"disable_tqdm": True, "logging_steps": max(1, overrides["steps"] // 20)}
    recipe = Recipe(
        stage=stage,
        batch_size=args.batch_size,
        block_size=args.block_size,
        warmup_steps=overrides["steps"] // 10 + 1,
        trainer=settings,
        **overrides,
    )
    with tempfile.TemporaryDirectory() as scratch:
        return train(student, teacher, data, scratch, recipe=recipe, resume=False, callbacks=[Deadline(args)])


def _read(name: str, args) -> tuple[torch.Tensor, dict]:
    """Blocks and probes of the development or the held-out text."""
    tokens = tokens_of(name)[: args.measured_tokens]
    blocks = tokens[: len(tokens) // LENGTH * LENGTH].view(-1, LENGTH)
    text = asset_path(f"{name}.txt").read_text(encoding="utf-8")
    material = Material(AutoTokenizer.from_pretrained(asset_path("tiny_teacher")), text)
    drawn = {
        task: [s for depth in DEPTHS for s in draw(task, material, LENGTH, depth, seed=0, count=args.samples)]
        for task in TASKS
    }
    return blocks, drawn


def summary(results: dict) -> list[dict]:
    """One dictionary for every number of kept layers.

    "named" holds, under the name of each rule, the set that the rule chose, its figures, and "better": the share of
    the other sets whose KL after distillation is higher. "kl" and "ppl_ratio" hold the mean, standard deviation,
    lowest ("best") and highest ("worst") value of all sets of this size.
    """
    (ranking,) = (row["ranking"] for row in results["rows"] if row["stage"] == "align")
    trained = {tuple(row["keep"]): row["trained"] for row in results["rows"] if row["stage"] == "distill"}
    layers, rows = len(ranking["layers"]), []
    for size in sorted({len(keep) for keep in trained}):
        sets_of_size = {keep: row for keep, row in trained.items() if len(keep) == size}
        named = {name: _chosen(ranking, parts, size) for name, parts in SCORES.items()}
        named["uniform"] = tuple(layers_to_keep(size / layers, layers))
        row = {"kept": size, "plans": len(sets_of_size), "named": {}}
        for name, keep in named.items():
            if keep in sets_of_size:
                beaten = [
                    sets_of_size[keep]["kl"] < other["kl"] for others, other in sets_of_size.items() if others != keep
                ]
                row["named"][name] = {
                    "keep": list(keep),
                    **sets_of_size[keep],
                    "better": sum(beaten) / max(1, len(beaten)),
                }
        for figure in ("kl", "ppl_ratio"):
            values = [found[figure] for found in sets_of_size.values()]
            mean, deviation = mean_and_deviation(values)
            row[figure] = {"mean": mean, "deviation": deviation, "best": min(values), "worst": max(values)}
        rows.append(row)
    return rows


def _chosen(ranking: dict, parts: tuple[str, ...], size: int) -> tuple[int, ...]:
    ranked = sorted(ranking["layers"], key=lambda row: -sum(row[part] for part in parts))
    return tuple(sorted(row["layer"] for row in ranked[:size]))


def table(results: dict) -> str:
    """One line for every set that a rule chose, and per number of kept layers the mean and the worst of all sets."""
    lines = []
    for found in summary(results):
        if not found["named"]:
            continue  # not all sets of this size are trained yet
        for name, chosen in found["named"].items():
            kept = ", ".join(map(str, chosen["keep"]))
            lines.append([found["kept"], name, kept, f"{chosen['kl']:.4f}", f"{chosen['ppl_ratio']:.4f}"])
        every = (found["kl"], found["ppl_ratio"])
        lines.append([found["kept"], f"mean of all {found['plans']}", "", *(f"{f['mean']:.4f}" for f in every)])
        lines.append([found["kept"], "worst of them", "", *(f"{f['worst']:.4f}" for f in every)])
    head = ["layers kept", "chosen by", "which", "KL to the teacher", "perplexity ratio"]
    return markdown_table(head, lines, figures=True) + f"\n\nHeld-out text; {measured_at(results)}."


def draw_sets(results: dict, path: Path) -> None:
    """Plot the KL to the teacher on held-out text after distillation: one dot per set, markers for the rules' sets."""
    from hf_memmix.training.experiments.common.plots import figure_of, save

    rows, trained = summary(results), [row for row in results["rows"] if row["stage"] == "distill"]
    caption = f"{results['settings']['distill_steps']} steps of distillation; {measured_at(results)}"
    figure, (panel,) = figure_of(1, caption)
    panel.plot([len(r["keep"]) for r in trained], [r["trained"]["kl"] for r in trained], ".", color="#999999")
    # open markers of several sizes, because two rules may choose the same set
    for marker, size, name in zip("*sDo", (16, 12, 8, 8), [*SCORES, "uniform"], strict=True):
        points = [(row["kept"], row["named"][name]["kl"]) for row in rows if name in row["named"]]
        style = {"markersize": size, "markerfacecolor": "none", "label": name}
        panel.plot(*zip(*points, strict=True), marker, **style) if points else None
    panel.plot([row["kept"] for row in rows], [row["kl"]["mean"] for row in rows], "_", markersize=18, label="mean")
    panel.set_xticks([row["kept"] for row in rows])
    panel.set_xlabel("layers that stay attention")
    panel.set_ylabel("KL to the teacher, held-out text")
    panel.margins(x=0.3)
    figure.legend(loc="outside right center", frameon=False, fontsize=8)
    save(figure, path)


class Options(DistillationOptions):
    text = TRAINING_TEXT
    mixer: str = "gka"
    sizes: Annotated[list[int], typer.Option(help="numbers of kept layers; repeatable")] = (1, 2)
    align_steps: int = ALIGN["steps"]
    distill_steps: int = DISTILL["steps"]
    samples: Annotated[int, typer.Option(help="sequences for each depth of a probe")] = 32


@command(Options)
def main(args) -> None:
    """Train a student for every set of kept layers and write the results."""
    text = describe_training_text(args.text)
    results = execute("compare_plans", __file__, args, rows_to_run, text=text, teacher=bundled_teacher())
    if len(results["rows"]) > 1:
        results["summary"] = summary(results)
        write_json(args.out, results)
        for row in results["summary"]:
            named = {name: round(found["kl"], 4) for name, found in row["named"].items()}
            print(row["kept"], "kept:", named, {k: round(v, 4) for k, v in row["kl"].items()})
        draw_if_asked(args, draw_sets, results)


if __name__ == "__main__":
    typer.run(main)
