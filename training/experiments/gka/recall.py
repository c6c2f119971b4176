"""How many key-value pairs does a memory recall? Multi-query associative recall (`common/mqar.py`).

    python training/experiments/gka/recall.py --out recall.json

The models have two layers. One model is trained for each cell (length, pairs) and learning rate (`rates_to_try`), on
new sequences at every step, until the loss is below 0.01 or all tokens are used. The learning rate is chosen by the
loss on development sequences. The reported accuracy is measured on test sequences, at this rate, with two seeds.
"""

import functools
import json
import math
from typing import Annotated

import torch
import torch.nn.functional as F
import typer

from hf_memmix.command_options import command
from hf_memmix.training.experiments.common.fit import MODELS, autocast, build, fit, query_logits, recall_loss
from hf_memmix.training.experiments.common.harness import device, execute
from hf_memmix.training.experiments.common.mqar import DEV_SEED, TEST_SEED, VOCAB, check_cell, draw_recall
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
from hf_memmix.training.experiments.gka.plots import plot_recall

TEST_BATCHES = 8
SOLVED = 0.01
SEEDS = (0, 1)
COMPARED = ("dec", "enc", "sim", "gka", "linear", "delta")


def generator(seed: int) -> torch.Generator:
    return torch.Generator(device()).manual_seed(seed)


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


@torch.no_grad()
def measure(model, batch: int, length: int, pairs: int, seed: int) -> tuple[float, float]:
    """Loss and accuracy on sequences that the seed draws; training uses other seeds."""
    draws, found = generator(seed), []
    with autocast():
        for _ in range(TEST_BATCHES):
            recall = draw_recall(batch, length, pairs, draws)
            logits = query_logits(model, recall.ids, recall.positions)
            loss = F.cross_entropy(logits.flatten(0, 1), recall.values.flatten())
            found.append(torch.stack([loss, (logits.argmax(-1) == recall.values).float().mean()]))
    loss, accuracy = torch.stack(found).mean(0).tolist()
    return loss, accuracy


def run(row: dict, args) -> dict:
    length, pairs, seed = row["length"], row["pairs"], row["seed"]
    model = build(args, *MODELS[row["model"]], vocab=VOCAB, context=length, seed=seed)
    batch = max(1, args.batch_tokens // length)
    steps = max(1, args.tokens // (batch * length))
    stream = generator(seed)

    def batch_of(step):
        recall = draw_recall(batch, length, pairs, stream)
        return recall.ids, recall.positions, recall.values

    loss_of = functools.partial(recall_loss, model)
    result = fit(model, loss_of, steps, row["lr"], args, batch_of, stop_below_loss=SOLVED)
    result |= {"parameters": model.num_parameters(), "sequences": result["steps"] * batch}
    if not result["finite"]:
        return result
    model.eval()
    dev, test = (measure(model, batch, length, pairs, start + seed) for start in (DEV_SEED, TEST_SEED))
    return result | {"dev_loss": dev[0], "accuracy": test[1]}


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
    check_names("--models", args.models, MODELS)
    for cell in args.cells:
        check_cell(*cell)
    results = execute("recall", __file__, args, rows_to_run, chance_loss=math.log(VOCAB // 2))
    draw_if_asked(args, plot_recall, results)


if __name__ == "__main__":
    typer.run(main)
