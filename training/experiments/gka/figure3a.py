"""Recall against the size of the model: GKA beside Mamba-2, Gated DeltaNet, GLA and DeltaNet (Figure 3a of the paper).

    python training/experiments/gka/figure3a.py --out gka_figure3a.json --workers 6

The task and the training are those of `recall.py`; the hidden size changes, and with it the head size. GKA has neither
decay nor alpha, as in the paper's figure, and Mamba-2 has a memory of the size of GKA's. That of the others is half as
large. The learning rate is chosen by the loss on development sequences with seed 0, the accuracy is measured on test
sequences.
"""

import json
import math
from types import SimpleNamespace
from typing import Annotated

import typer

from hf_memmix.command_options import command
from hf_memmix.training.experiments.common.fit import MODELS as KNOWN
from hf_memmix.training.experiments.common.fit import memory_of
from hf_memmix.training.experiments.common.harness import execute
from hf_memmix.training.experiments.common.mqar import VOCAB, check_cell
from hf_memmix.training.experiments.common.options import (
    BatchTokens,
    Heads,
    Layers,
    PlottedOptions,
    Rates,
    Tokens,
    check_names,
    draw_if_asked,
)
from hf_memmix.training.experiments.common.rates import rates_to_try
from hf_memmix.training.experiments.common.recall import train_recall
from hf_memmix.training.experiments.gka.figure3a_report import plot

PLAIN = {"use_decay": False, "use_alpha": False}
MODELS = {"gka": ("gka", PLAIN)} | {name: KNOWN[name] for name in ("mamba2", "gdn", "gla", "delta")}


def model_of(name: str, hidden_size: int, args: SimpleNamespace) -> tuple[SimpleNamespace, str, dict]:
    """The arguments, the mixer and the mixer's options of a model of this size."""
    mixer, options = MODELS[name]
    if name == "mamba2":  # its memory has expand * hidden_size * state_size numbers, GKA's 2 * hidden_size * head size
        options = {"state_size": hidden_size // args.heads}
    return SimpleNamespace(**{**vars(args), "hidden_size": hidden_size}), mixer, options


def rows_to_run(done: list[dict], args) -> list[dict]:
    """The smallest model first; within a size all models at a rate before the next rate."""
    rows = []
    for hidden_size in args.hidden_sizes:
        for length, pairs in args.cells:
            tries = []
            for name in args.models:
                of = {"model": name, "hidden_size": hidden_size, "length": length, "pairs": pairs}
                lrs, _ = rates_to_try(done, args.lrs, **of, seed=0)
                tries += [(lrs.index(lr), {**of, "lr": lr, "seed": 0}) for lr in lrs]
            rows += [row for _, row in sorted(tries, key=lambda pair: pair[0])]
    return rows


def run(row: dict, args) -> dict:
    model = model_of(row["model"], row["hidden_size"], args)
    result = train_recall(*model, row["length"], row["pairs"], row["lr"], row["seed"])
    return result | {"state_bytes": 4 * memory_of(*model)[0]}


class Options(PlottedOptions):
    hidden_sizes: Annotated[list[int], typer.Option(help="hidden sizes of the models; repeatable")] = (32, 64, 128)
    layers: Layers = 2
    heads: Heads = 2
    batch_tokens: BatchTokens = 32768
    tokens: Tokens = 100_000_000
    cells: Annotated[str, typer.Option(help="[[length, pairs], ...] as JSON")] = "[[256, 64]]"
    lrs: Rates = (3e-3, 1e-2)
    models: Annotated[list[str], typer.Option(help="models to compare; repeatable")] = tuple(MODELS)


@command(Options)
def main(args) -> None:
    """Train every model at every size and write the results."""
    args.cells = json.loads(args.cells)
    for cell in args.cells:
        check_cell(*cell)
    check_names("--models", args.models, MODELS)
    results = execute("gka_figure3a", __file__, args, rows_to_run, chance_loss=math.log(VOCAB // 2))
    draw_if_asked(args, lambda found, path: plot([found], path), results)


if __name__ == "__main__":
    typer.run(main)
