"""Which part of Lattice helps? Varies the update rule, the number of slots and the form of the step size.

    python training/experiments/lattice/ablation.py --text text.npy --out lattice_ablation.json

All language models have the same size and the same data. The variants of Table 4 of Karami and Mirrokni, from the
delta rule to the full update (`IN_PAPER`), are trained with every learning rate (`rates_to_try`), and with a second
seed at the rate of the lowest development loss. The paper does not give the number of slots and the form of the step
size; these variants (`NOT_IN_PAPER`) are trained with both seeds at the rate that was best for DEC. The results name a
variant "rung".
"""

import typer

from hf_memmix.training.experiments.common.fit import train_language_model
from hf_memmix.training.experiments.common.harness import Experiment
from hf_memmix.training.experiments.common.options import LanguageModelOptions, WarmupSteps
from hf_memmix.training.experiments.common.rates import plan, rates_to_try
from hf_memmix.training.experiments.common.text import describe_training_text
from hf_memmix.training.experiments.lattice.variants import IN_PAPER, NOT_IN_PAPER

SEEDS = (0, 1)


def rows_to_run(done: list[dict], args) -> list[dict]:
    budget = {"context": args.context}
    rows = plan(done, [{"rung": rung} for rung in IN_PAPER], args.lrs, SEEDS, [budget])
    _, lr = rates_to_try(done, args.lrs, rung="+ projection", seed=0)
    others = NOT_IN_PAPER if lr is not None else ()
    return rows + [{"rung": rung, **budget, "lr": lr, "seed": seed} for seed in SEEDS for rung in others]


def run(row: dict, args) -> dict:
    options, paper = IN_PAPER.get(row["rung"]) or (NOT_IN_PAPER[row["rung"]], None)
    result = train_language_model(row, args, "lattice", options, warmup_steps=args.warmup_steps)
    result |= {"options": options}
    return result | ({} if paper is None else {"paper_perplexity_on_pile": paper})


class Options(LanguageModelOptions):
    context: int = 1024
    warmup_steps: WarmupSteps = 150


main = Experiment(
    "lattice_ablation", __file__, Options, rows_to_run, about=lambda args: describe_training_text(args.text)
).command()


if __name__ == "__main__":
    typer.run(main)
