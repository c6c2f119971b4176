"""How many key-value pairs does a memory recall? Multi-query associative recall (`common/mqar.py`).

    python training/experiments/gka/recall.py --out recall.json

The models have two layers. One model is trained for each cell (length, pairs) and learning rate (`rates_to_try`), on
new sequences at every step, until the loss is below 0.01 or all tokens are used. The learning rate is chosen by the
loss on development sequences. The reported accuracy is measured on test sequences, at this rate, with three seeds.
"""

import json
import math
from typing import Annotated

import typer

from hf_memmix.command_options import command
from hf_memmix.training.experiments.common.fit import NAMES, model_of
from hf_memmix.training.experiments.common.harness import execute
from hf_memmix.training.experiments.common.mqar import VOCAB, check_cell
from hf_memmix.training.experiments.common.options import (
    BatchTokens,
    Heads,
    HiddenSize,
    Layers,
    PlottedOptions,
    Rates,
    Tokens,
    check_names,
    draw_if_asked,
)
from hf_memmix.training.experiments.common.rates import rates_to_try
from hf_memmix.training.experiments.common.recall import train_recall
from hf_memmix.training.experiments.gka.plots import plot_recall

SEEDS = (0, 1, 2)
COMPARED = (
    "transformer", "gka", "gdn", "dec", "dec-vconv", "mamba2", "delta", "gla", "linear-decay", "coffee", "enc", "sim",
    "linear", "gdn-vconv", "gka-equal", "mamba2-equal",
)  # fmt: skip


def rows_to_run(done: list[dict], args) -> list[dict]:
    rows, seconds = [], []
    for length, pairs in args.cells:
        tries = []
        for name in args.models:
            of = {"model": name, "length": length, "pairs": pairs}
            lrs, chosen = rates_to_try(done, args.lrs, **of, seed=0)
            tries += [(lrs.index(lr), {**of, "lr": lr, "seed": 0}) for lr in lrs]
            seconds += [{**of, "lr": chosen, "seed": seed} for seed in SEEDS if chosen is not None]
        rows += [row for _, row in sorted(tries, key=lambda pair: pair[0])]
    return rows + seconds


def run(row: dict, args) -> dict:
    return train_recall(*model_of(row["model"], args), row["length"], row["pairs"], row["lr"], row["seed"])


class Options(PlottedOptions):
    hidden_size: HiddenSize = 64
    layers: Layers = 2
    heads: Heads = 2
    batch_tokens: BatchTokens = 32768
    tokens: Tokens = 100_000_000
    cells: Annotated[str, typer.Option(help="[[length, pairs], ...] as JSON")] = "[[256, 32], [256, 64], [512, 128]]"
    lrs: Rates = (3e-3, 1e-2)
    models: Annotated[list[str], typer.Option(help="models to compare; repeatable")] = COMPARED


@command(Options)
def main(args) -> None:
    """Train every model in every cell and write the results."""
    args.cells = json.loads(args.cells)
    check_names("--models", args.models, NAMES)
    for cell in args.cells:
        check_cell(*cell)
    results = execute("recall", __file__, args, rows_to_run, chance_loss=math.log(VOCAB // 2))
    draw_if_asked(args, plot_recall, results)


if __name__ == "__main__":
    typer.run(main)
