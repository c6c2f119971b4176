"""Which mixer replaces attention best, and how much do kept attention layers help? Equal budgets for all mixers.

    python training/experiments/conversion/table.py --text text.npy --out conversion_table.json --plot

Each row converts the bundled transformer, then aligns and distils the student on the same tokens in the same order. It
measures the perplexity on the held-out text relative to the teacher, and those probes of `memmix eval` that this small
teacher can answer in part. With all layers converted, each mixer is trained with every learning rate, and with others
while the best one is the largest or the smallest. The rate with the lowest development loss is then used for every
number of kept layers. "gla" is gated linear attention in GKA's block.
"""

import itertools
import math
import tempfile
import time
from typing import Annotated

import torch
import typer
from transformers import AutoTokenizer

from hf_memmix.assets import asset_path
from hf_memmix.command_options import command
from hf_memmix.conversion import convert_model, load_model, report
from hf_memmix.conversion.convert import layers_to_keep
from hf_memmix.training.data import TokenBlocks
from hf_memmix.training.evaluation.probes import Material, run_probes
from hf_memmix.training.experiments.bundled.versions import bundled_teacher
from hf_memmix.training.experiments.common import baselines  # noqa: F401, registers "gla"
from hf_memmix.training.experiments.common.fit import Deadline
from hf_memmix.training.experiments.common.harness import device, execute
from hf_memmix.training.experiments.common.options import DistillationOptions, FurtherRates, draw_if_asked
from hf_memmix.training.experiments.common.rates import MAX_EXTENSIONS, rates_to_try
from hf_memmix.training.experiments.common.text import describe_training_text, train_tokens
from hf_memmix.training.experiments.common.text import measured_tokens as tokens_of
from hf_memmix.training.experiments.conversion import table_report
from hf_memmix.training.train import Recipe, train

MIXERS = ("gka", "ska", "lattice", "coffee", "gla", "mamba2")
KEPT = (0.0, 0.125, 0.25, 0.5)
# peak learning rates of the stages and parameter groups; the row's "scale" multiplies them
STAGE_RATES = {"align": 3e-3, "mixers": 1.5e-3, "rest": 4e-4}
PROBES = {"tasks": ("niah", "mqar", "mentions"), "lengths": (256, 512, 1024)}


def rows_to_run(done: list[dict], args) -> list[dict]:
    first, chosen = [], {}
    for mixer in args.mixers:
        cell = {"mixer": mixer, "kept": 0.0, "seed": 0}
        scales, best = rates_to_try(done, args.scales, args.further_rates, key="scale", **cell)
        first += [(n, cell | {"scale": scale}) for n, scale in enumerate(scales)]
        if best is not None:
            chosen[mixer] = best
    rows = [{"mixer": "attention", "kept": 1.0, "scale": 0.0, "seed": 0}]
    rows += [row for _, row in sorted(first, key=lambda pair: pair[0])]  # one rate of every mixer before the next rate
    # the whole table runs with one seed before any row runs with the next seed
    cells = itertools.product(range(args.seeds), KEPT, chosen)
    return rows + [{"mixer": m, "kept": kept, "scale": chosen[m], "seed": seed} for seed, kept, m in cells]


def run(row: dict, args) -> dict:
    teacher = load_model(asset_path("tiny_teacher"), dtype=torch.float32).to(device())
    if row["mixer"] == "attention":
        return {"parameters": teacher.num_parameters(), "probes": recalled(teacher, args)}
    keep = layers_to_keep(row["kept"] or "none", teacher.config.num_hidden_layers)
    student = convert_model(teacher, row["mixer"], keep or "none", seed=row["seed"])
    data = TokenBlocks(train_tokens(args.text).long(), args.block_size)
    result = {"kept_layers": keep, "parameters": student.num_parameters(), "trained_tokens": 0, "curves": {}}
    began = time.time()
    for stage, steps in (("align", args.align_steps), ("distill", args.distill_steps)):
        rate = STAGE_RATES["align" if stage == "align" else "mixers"] * row["scale"]
        recipe = Recipe(
            stage=stage,
            steps=steps,
            batch_size=args.batch_size,
            block_size=args.block_size,
            learning_rate=rate,
            rest_learning_rate=STAGE_RATES["rest"] * row["scale"],
            warmup_steps=steps // 10 + 1,
            seed=row["seed"],
            trainer={"disable_tqdm": True, "logging_steps": max(1, steps // 20)},
        )
        with tempfile.TemporaryDirectory() as scratch:
            try:
                done = train(student, teacher, data, scratch, recipe=recipe, resume=False, callbacks=[Deadline(args)])
            except ValueError as error:  # diverged
                return result | {"finite": False, "diverged": str(error)[:200]}
        result["curves"][stage] = [[entry["step"], entry["loss"]] for entry in done["log"]]
        result["trained_tokens"] += steps * args.batch_size * args.block_size
    result |= {"training_seconds": round(time.time() - began, 1), "finite": True, "probes": recalled(student, args)}
    for name in ("dev", "heldout"):
        tokens = tokens_of(name)[: args.measured_tokens]
        compared = report(student, teacher, tokens, block_size=args.block_size)
        result[f"{name}_loss"] = math.log(compared["student_ppl"])
        result[f"{name}_ppl_ratio"], result[f"{name}_kl"] = compared["ppl_ratio"], compared["kl"]
    return result


def recalled(model, args) -> dict:
    """The means of each probe: the summary of `run_probes` by task."""
    folder = asset_path("tiny_teacher")
    material = Material(AutoTokenizer.from_pretrained(folder), asset_path("heldout.txt").read_text())
    probes = run_probes({"model": model}, material, samples=args.samples, batch_size=32, **PROBES)
    return {row["task"]: row["model"] | {"chance": row["chance"]} for row in probes["summary"]}


class Options(DistillationOptions):
    mixers: Annotated[list[str], typer.Option(help="repeatable")] = MIXERS
    scales: Annotated[list[float], typer.Option(help="factors of the learning rates; repeatable")] = (1.0, 0.5, 2.0)
    further_rates: FurtherRates = MAX_EXTENSIONS
    seeds: Annotated[int, typer.Option(help="number of seeds at the chosen rate")] = 2
    align_steps: int = 100
    distill_steps: int = 500
    samples: Annotated[int, typer.Option(help="probes per cell")] = 32


@command(Options)
def main(args) -> None:
    """Convert and train every row and write the results."""
    text = describe_training_text(args.text)
    results = execute("conversion_table", __file__, args, rows_to_run, text=text, teacher=bundled_teacher())
    draw_if_asked(args, table_report.plot, results)


if __name__ == "__main__":
    typer.run(main)
