"""Which mixer takes over a transformer best, and what kept attention layers buy: the bundled teacher, equal budgets.

    python training/experiments/conversion_table.py --text text.npy --out training/results/conversion_table.json --plot

Each row converts the bundled transformer, aligns and distils it on the same tokens of the training text in the same
order, and measures it: perplexity beside the teacher's on the held-out text, and the probes of `memmix eval` that this
small teacher has something of. Each mixer is trained with every learning rate where all layers are converted; the rate
of lowest development loss serves it at every number of kept layers. "gla" is gated linear attention in GKA's block.
"""

import itertools
import math
import tempfile
import time
from pathlib import Path

import torch
from transformers import AutoTokenizer

from hf_memmix.assets import asset_path
from hf_memmix.conversion import convert_model, load_model, report
from hf_memmix.conversion.convert import layers_to_keep
from hf_memmix.training.data import TokenBlocks
from hf_memmix.training.experiments import baselines  # noqa: F401, registers "gla"
from hf_memmix.training.experiments.fit import Deadline, best
from hf_memmix.training.experiments.harness import device, execute, parser_of
from hf_memmix.training.experiments.text import measured_tokens, text_record, train_tokens
from hf_memmix.training.probes import Material, run_probes
from hf_memmix.training.train import Recipe, train

MIXERS = ("gka", "ska", "lattice", "coffee", "gla")
KEPT = (0.0, 0.125, 0.25, 0.5)
# peak rates of the stages, times the row's "scale"
RATES = {"align": 3e-3, "mixers": 1.5e-3, "rest": 4e-4}
PROBES = {"tasks": ("niah", "mqar", "mentions"), "lengths": (256, 512, 1024)}


def plan(done: list[dict], args) -> list[dict]:
    rows = [{"mixer": "attention", "kept": 1.0, "scale": 0.0, "seed": 0}]
    rows += [{"mixer": m, "kept": 0.0, "scale": s, "seed": 0} for s in args.scales for m in args.mixers]
    chosen = {}
    for mixer in args.mixers:
        tried = [row for row in done if row["mixer"] == mixer and row["kept"] == 0 and row["seed"] == 0]
        if len(tried) >= len(args.scales) and (row := best(tried)) is not None:
            chosen[mixer] = row["scale"]
    # the whole table of one seed before the next, in case time is short
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
        rate = RATES["align" if stage == "align" else "mixers"] * row["scale"]
        recipe = Recipe(
            stage=stage,
            steps=steps,
            batch_size=args.batch_size,
            block_size=args.block_size,
            learning_rate=rate,
            rest_learning_rate=RATES["rest"] * row["scale"],
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
        tokens = measured_tokens(name)[: args.measured_tokens]
        compared = report(student, teacher, tokens, block_size=args.block_size)
        result[f"{name}_loss"] = math.log(compared["student_ppl"])
        result[f"{name}_ppl_ratio"], result[f"{name}_kl"] = compared["ppl_ratio"], compared["kl"]
    return result


def recalled(model, args) -> dict:
    """What a model recalls, for each probe: see `training.probes.grid.means`."""
    folder = asset_path("tiny_teacher")
    material = Material(AutoTokenizer.from_pretrained(folder), asset_path("heldout.txt").read_text())
    probes = run_probes({"model": model}, material, samples=args.samples, batch_size=32, **PROBES)
    return {row["task"]: row["model"] | {"chance": row["chance"]} for row in probes["summary"]}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--text", type=Path, required=True, help="training text, .txt or .npy of text.py")
    parser.add_argument("--mixers", nargs="+", default=list(MIXERS))
    parser.add_argument("--scales", type=float, nargs="+", default=[1.0, 0.5, 2.0], help="of the learning rates")
    parser.add_argument("--seeds", type=int, default=2, help="at the chosen rate")
    parser.add_argument("--align-steps", type=int, default=100)
    parser.add_argument("--distill-steps", type=int, default=500)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--block-size", type=int, default=512)
    parser.add_argument("--measured-tokens", type=int, default=60_000, help="of each text")
    parser.add_argument("--samples", type=int, default=32, help="probes a cell")
    args = parser.parse_args()
    results = execute(Path(__file__).stem, args, plan, text=text_record(args.text))
    if args.plot:
        from hf_memmix.training.experiments.conversion_report import plot

        plot(results, args.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
