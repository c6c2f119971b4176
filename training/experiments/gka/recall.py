"""How many key-value pairs does a memory recall? Multi-query associative recall (`common/mqar.py`).

    python training/experiments/gka/recall.py --out recall.json

The models have two layers. One model is trained for each cell (length, pairs) and learning rate (`rates_to_try`), on
new sequences at every step, until the loss is below 0.01 or all tokens are used. The learning rate is chosen by the
loss on development sequences. The reported accuracy is measured on test sequences, at this rate, with every seed.
Figure 3a of the GKA paper is `--hidden-size 128` beside 64, with "gka-plain", which has neither decay nor alpha.
"""

import math

import typer

from hf_memmix.training.experiments.common.fit import NAMES, model_of
from hf_memmix.training.experiments.common.harness import Experiment
from hf_memmix.training.experiments.common.mqar import VOCAB
from hf_memmix.training.experiments.common.options import (
    BatchTokens,
    Cells,
    Heads,
    HiddenSize,
    Layers,
    Models,
    Options,
    Rates,
    Seeds,
    Tokens,
    check_names,
    read_cells,
)
from hf_memmix.training.experiments.common.rates import plan
from hf_memmix.training.experiments.common.recall import train_recall

COMPARED = (
    "transformer", "gka", "gdn", "dec", "dec-vconv", "mamba2", "delta", "gla", "linear-decay", "coffee", "enc", "sim",
    "linear", "gdn-vconv", "gka-equal", "mamba2-equal",
)  # fmt: skip


def rows_to_run(done: list[dict], args) -> list[dict]:
    cells = [{"length": length, "pairs": pairs} for length, pairs in args.cells]
    return plan(done, [{"model": name, **cell} for cell in cells for name in args.models], args.lrs, args.seeds)


def check(args) -> None:
    check_names("--models", args.models, NAMES)
    read_cells(args)


def run(row: dict, args) -> dict:
    return train_recall(*model_of(row["model"], args), row["length"], row["pairs"], row["lr"], row["seed"])


class RecallOptions(Options):
    hidden_size: HiddenSize = 64
    layers: Layers = 2
    heads: Heads = 2
    batch_tokens: BatchTokens = 32768
    tokens: Tokens = 100_000_000
    cells: Cells = "[[256, 32], [256, 64], [512, 128]]"
    lrs: Rates = (3e-3, 1e-2)
    models: Models = COMPARED
    seeds: Seeds = (0, 1, 2)


main = Experiment(
    "recall", __file__, RecallOptions, rows_to_run, check, lambda args: {"chance_loss": math.log(VOCAB // 2)}
).command()


if __name__ == "__main__":
    typer.run(main)
