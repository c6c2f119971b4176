"""Does a mixture of mixers that is chosen by measurement beat the best single mixer at equal state bytes?

    python training/experiments/mixtures/mixtures.py --text train.txt --out mixtures.json --plot

The script aligns every mixer in every layer of the bundled transformer once per seed, and scores each pair of layer
and mixer on the development text, as `memmix select` does. Then it distils one student per layout, from the same
aligned mixers, on the same tokens in the same order. Layouts are single mixers, the Echo paper's (Mamba-2 with SKA in
two layers), uniform mixtures, and the choice of `select` with all and with half of the state bytes of the best single
mixer. The best single mixer has the lowest KL on the development text in the first seed. The reported figures are
those of the held-out text.
"""

import statistics
import tempfile
from pathlib import Path
from typing import Annotated

import torch
import typer

from hf_memmix.assets import asset_path
from hf_memmix.command_options import command
from hf_memmix.conversion import convert_model, load_model, mixer_types_of, report
from hf_memmix.conversion.layer_cost import LayerCost
from hf_memmix.conversion.mixer_files import load_mixers
from hf_memmix.serving.footprint import Footprint, state_bytes
from hf_memmix.swap import memory_mixers
from hf_memmix.training.data import TokenBlocks
from hf_memmix.training.evaluation.layer_selection import rank_layers
from hf_memmix.training.evaluation.mixer_search import Budget, aligned_student, choose_mixers, scores_of
from hf_memmix.training.evaluation.probes import Material, draw
from hf_memmix.training.evaluation.probes.score import score
from hf_memmix.training.experiments.bundled.versions import bundled_teacher
from hf_memmix.training.experiments.common.fit import Deadline
from hf_memmix.training.experiments.common.harness import device, execute
from hf_memmix.training.experiments.common.options import (
    MeasuredTokens,
    PlottedOptions,
    TrainingText,
    draw_if_asked,
)
from hf_memmix.training.experiments.common.text import describe_training_text, tokenizer, train_tokens
from hf_memmix.training.experiments.common.text import measured_tokens as tokens_of
from hf_memmix.training.experiments.mixtures.report import plot
from hf_memmix.training.train import Recipe, train

TASK, LENGTH = "mentions", 256  # the only probe that the bundled transformer answers
RATES = {"align": {"learning_rate": 5e-3}, "distill": {"learning_rate": 1e-3, "rest_learning_rate": 1e-4}}
UNIFORM = {
    "gka, coffee alternating": {"gka": [1, 3, 5], "coffee": "rest"},
    "gka in Echo's places, mamba2": {"gka": [2, 3], "mamba2": "rest"},
}
CHOSEN = {"select": 1.0, "select, half": 0.5}  # the share of the best single mixer's state bytes


def rows_to_run(done: list[dict], args) -> list[dict]:
    """The rows of one seed after the other, so that a run that stops early has compared all layouts of some seeds."""
    rows = []
    for seed in range(args.seeds):
        align = [{"stage": "align", "mixer": mixer, "seed": seed} for mixer in args.mixers]
        aligned = [row for row in done if row["stage"] == "align" and row["seed"] == seed and "ranking" in row]
        rows += align
        if len(aligned) < len(align):
            return rows
        rows += [{"stage": "distill", "layout": name, "seed": seed} for name in (*args.mixers, "echo", *UNIFORM)]
        best = best_single(done, args)
        for name, share in {} if best is None else CHOSEN.items():
            types = choice(aligned, seed, int(share * best["state_bytes"]))
            rows.append({"stage": "distill", "layout": name, "seed": seed, "types": types})
    return rows


def best_single(done: list[dict], args) -> dict | None:
    """The row of the mixer with the lowest KL on the development text, of seed 0; None until all are trained."""
    single = [row for row in done if row.get("layout") in args.mixers and row["seed"] == 0 and row.get("finite")]
    return min(single, key=lambda row: row["dev_kl"]) if len(single) == len(args.mixers) else None


def choice(aligned: list[dict], seed: int, budget: int) -> list[str]:
    """The mixture with the lowest sum of scores within a budget of state bytes, without attention."""
    rows = {row["mixer"]: row for row in aligned if row["seed"] == seed}
    scores = scores_of({mixer: row["ranking"] for mixer, row in rows.items()})
    scores = [{kind: value for kind, value in layer.items() if kind in rows} for layer in scores]
    costs = [{m: LayerCost(row["layer_bytes"], None, None) for m, row in rows.items()} for _ in scores]
    return choose_mixers(scores, costs, Budget(state_bytes=budget))


def run(row: dict, args) -> dict:
    teacher = load_model(asset_path("tiny_teacher"), dtype=torch.float32).to(device())
    if row["stage"] == "align":
        return align(teacher, row["mixer"], row["seed"], args)
    name = row["layout"]
    uniform = {mixer: {mixer: "rest"} for mixer in args.mixers} | UNIFORM
    types = row.get("types") or mixer_types_of(uniform.get(name, name), teacher.config.num_hidden_layers)
    student = convert_model(teacher, layers=types, seed=row["seed"])
    load_mixers(student, _folder(args, row["seed"]))
    size = Footprint.of(student.config, torch.float32).state_bytes()
    result = {"types": types, "state_bytes": size, "parameters": student.num_parameters()}
    with tempfile.TemporaryDirectory() as scratch:
        try:
            recipe = _recipe("distill", args.distill_steps, row["seed"], args)
            done = train(
                student, teacher, _data(args), scratch, recipe=recipe, resume=False, callbacks=[Deadline(args)]
            )
        except ValueError as error:  # diverged
            return result | {"finite": False, "diverged": str(error)[:200]}
    result |= {"finite": True, "curve": [[entry["step"], entry["loss"]] for entry in done["log"]]}
    for text in ("dev", "heldout"):
        tokens = tokens_of(text)[: args.measured_tokens]
        compared = report(student, teacher, tokens, block_size=args.block_size)
        result |= {f"{text}_{name}": compared[name] for name in ("ppl_ratio", "kl", "top1_agreement")}
    answers, ours, theirs = _samples("heldout", args), [], []
    for model, found in ((student, ours), (teacher, theirs)):
        found += score(model.eval(), answers[TASK], args.batch_size, control=False)
    nll = {who: statistics.fmean(s.nll for s in found) for who, found in (("student", ours), ("teacher", theirs))}
    return result | {"answers_nll": nll["student"], "answers_nll_teacher": nll["teacher"]}


def align(teacher, mixer: str, seed: int, args) -> dict:
    """Align one mixer in all layers, keep it for the other rows, and score its layers on the development text."""
    recipe = _recipe("align", args.align_steps, seed, args)
    folder = _folder(args, seed)
    student = aligned_student(teacher, mixer, _data(args), folder, recipe, seed=seed, callbacks=[Deadline(args)])
    student = student.to(device()).eval()
    blocks = tokens_of("dev")[: args.measured_tokens // LENGTH * LENGTH].view(-1, LENGTH)
    ranking = rank_layers(teacher, student, blocks, _samples("dev", args), batch_size=args.batch_size)
    size = state_bytes(memory_mixers(student)[0], torch.float32)
    return {"ranking": ranking, "layer_bytes": size}


def _samples(text: str, args) -> dict:
    material = Material(tokenizer(), asset_path(f"{text}.txt").read_text(encoding="utf-8"))
    return {TASK: draw(TASK, material, LENGTH, None, seed=0, count=args.samples)}


def _recipe(stage: str, steps: int, seed: int, args) -> Recipe:
    return Recipe(
        stage=stage,
        steps=steps,
        batch_size=args.batch_size,
        block_size=args.block_size,
        warmup_steps=steps // 10 + 1,
        seed=seed,
        trainer={"disable_tqdm": True, "logging_steps": max(1, steps // 20)},
        **RATES[stage],
    )


def _data(args) -> TokenBlocks:
    return TokenBlocks(train_tokens(args.text).long(), args.block_size)


def _folder(args, seed: int) -> Path:
    return args.out.with_suffix(".mixers") / f"seed-{seed}"


class Options(PlottedOptions):
    text: TrainingText
    mixers: Annotated[list[str], typer.Option(help="repeatable")] = ("gka", "lattice", "mamba2", "coffee", "ska")
    seeds: Annotated[int, typer.Option(help="number of seeds")] = 2
    align_steps: int = 20
    distill_steps: int = 4
    batch_size: int = 2
    block_size: int = 256
    measured_tokens: MeasuredTokens = 1024
    samples: Annotated[int, typer.Option(help="probes of each text")] = 4


@command(Options)
def main(args) -> None:
    """Align, choose and distil every row and write the results."""
    about = {"text": describe_training_text(args.text), "teacher": bundled_teacher()}
    results = execute("mixtures", __file__, args, rows_to_run, **about)
    draw_if_asked(args, plot, results)


if __name__ == "__main__":
    typer.run(main)
