"""Which part of Lattice helps? Varies the update rule, the number of slots and the form of the step size.

    python training/experiments/lattice/ablation.py --text text.npy --out lattice_ablation.json

All language models have the same size and the same data. The variants of Table 4 of Karami and Mirrokni, from the
delta rule to the full update (`IN_PAPER`), are trained with every learning rate (`rates_to_try`), and with a second
seed at the rate of the lowest development loss. The paper does not give the number of slots and the form of the step
size; these variants (`NOT_IN_PAPER`) are trained with both seeds at the rate that was best for DEC. The results name a
variant "rung".
"""

import typer

from hf_memmix.command_options import command
from hf_memmix.training.experiments.common.fit import train_language_model
from hf_memmix.training.experiments.common.harness import execute
from hf_memmix.training.experiments.common.options import LanguageModelOptions, draw_if_asked
from hf_memmix.training.experiments.common.rates import rates_to_try
from hf_memmix.training.experiments.common.text import describe_training_text
from hf_memmix.training.experiments.lattice.plots import plot_ablation
from hf_memmix.training.experiments.lattice.variants import IN_PAPER, NOT_IN_PAPER

SEEDS = (0, 1)


def rows_to_run(done: list[dict], args) -> list[dict]:
    rows, chosen = [], {}
    for rung in IN_PAPER:
        lrs, chosen[rung] = rates_to_try(done, args.lrs, rung=rung, seed=0)
        rows += [(lrs.index(lr), {"rung": rung, "context": args.context, "lr": lr, "seed": 0}) for lr in lrs]
    rows = [row for _, row in sorted(rows, key=lambda pair: pair[0])]
    others = dict.fromkeys(NOT_IN_PAPER, chosen["+ projection"])
    for seed, rungs in ((1, chosen), *((seed, others) for seed in SEEDS)):
        rows += [
            {"rung": rung, "context": args.context, "lr": lr, "seed": seed}
            for rung, lr in rungs.items()
            if lr is not None
        ]
    return rows


def run(row: dict, args) -> dict:
    options, paper = IN_PAPER.get(row["rung"]) or (NOT_IN_PAPER[row["rung"]], None)
    result = train_language_model(row, args, "lattice", options) | {"options": options}
    return result | ({} if paper is None else {"paper_perplexity_on_pile": paper})


class Options(LanguageModelOptions):
    context: int = 1024


@command(Options)
def main(args) -> None:
    """Train every variant and write the results."""
    results = execute("lattice_ablation", __file__, args, rows_to_run, **describe_training_text(args.text))
    draw_if_asked(args, plot_ablation, results)


if __name__ == "__main__":
    typer.run(main)
