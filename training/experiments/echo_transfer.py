"""Echo's transfer suite: train once on two tasks at 64 tokens, answer the same and four others, up to 4096 tokens.

    python training/experiments/echo_transfer.py --workers 10 --out training/results/echo_transfer.json --plot

Tables 2 and 3 of the paper with its three models of a million parameters and AdamW. The paper takes 6,000 steps of 16
sequences; so trained, three of eight of our models were still on the plateau before recall when their rate had fallen.
Hence larger batches here, and a rate that falls in the last part of the training only, for all models alike. Each
learning rate runs with every seed; a model's is that of the lowest mean loss on dev sequences of the trained tasks.
"""

import argparse
from collections.abc import Iterable, Iterator
from pathlib import Path

from hf_memmix.training.experiments import echo_suite as suite
from hf_memmix.training.experiments.echo_tasks import TASKS, check_task
from hf_memmix.training.experiments.harness import attempt, execute, parser_of


def cells(args: argparse.Namespace) -> Iterator[tuple[str, int, int]]:
    """Every (task, length, pairs) that there is room for."""
    for task in TASKS:
        for length in args.lengths:
            for pairs in suite.PAIRS if task != "niah" else (1,):
                try:
                    check_task(task, length, pairs)
                except ValueError:
                    continue
                yield task, length, pairs


def accuracies(model, grid: Iterable[tuple], masked: bool, args: argparse.Namespace, errors: dict) -> list[list]:
    """[task, length, pairs, accuracy] for each cell whose measurement did not fail."""
    found = []
    for cell in grid:
        name = " ".join(map(str, cell))
        result = attempt(errors, name, suite.measure, model, *cell, args.sequences, masked, suite.TEST_SEED)
        found += [] if result is None else [[*cell, round(result["accuracy"], 4)]]
    return found


def learn_and_measure(row: dict, args: argparse.Namespace, masked: bool = True, **ska) -> Iterator[dict]:
    """Train the row's model, then its accuracy in every cell: "cells" [[task, length, pairs, accuracy]]."""
    model, errors = suite.build(row["model"], row["seed"], **ska), {}
    masked = masked and row["model"] == "ska"
    batches = suite.training_batches(row["seed"], args.batch, args.length, args.pairs)
    result = suite.learn(model, batches, masked, row, args) | {"parameters": model.num_parameters()}
    yield result
    if not result["finite"]:
        return
    loss = attempt(errors, "dev loss", suite.training_loss, model, masked, args.length, args.pairs, args.sequences)
    yield {} if loss is None else {"dev_loss": loss}
    yield {"cells": accuracies(model, cells(args), masked, args, errors)}
    agreement = attempt(
        errors, "decode", suite.decode_agreement, model, masked, args.length, min(args.pairs), args.sequences
    )
    yield {} if agreement is None else {"decode_agreement": agreement}
    if row["model"] == "ska" and ska.get("chunk_size") != 1 and ska.get("normalization") != "sequence_max":
        suite.set_ska(model, refresh_every=1)
        trained = (cell for cell in cells(args) if cell[0] in suite.TRAINED)
        refreshed = {}
        yield {"refreshed": accuracies(model, trained, masked, args, refreshed)}
        errors |= {f"refreshed {name}": message for name, message in refreshed.items()}
    if errors:
        yield {"errors": errors}


def plan(done: list[dict], args) -> list[dict]:
    """Every rate and seed of one model after another, the paper's own first."""
    return [
        {"model": name, "lr": lr, "seed": seed}
        for name in reversed(args.models)
        for seed in range(args.seeds)
        for lr in args.lrs
    ]


def run(row: dict, args) -> Iterator[dict]:
    return learn_and_measure(row, args)


def add_protocol(parser: argparse.ArgumentParser, lengths: tuple[int, ...]) -> None:
    """Arguments of the training and the grid."""
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--batch", type=int, default=64, help="sequences of a step")
    parser.add_argument("--length", type=int, default=64, help="tokens of a training sequence")
    parser.add_argument("--pairs", type=int, nargs="+", default=[2, 4, 8], help="pairs in training, in equal parts")
    parser.add_argument("--lengths", type=int, nargs="+", default=list(lengths), help="tokens when measuring")
    parser.add_argument("--sequences", type=int, default=128, help="measured in a cell, at least")


def main() -> None:
    parser = parser_of(__doc__)
    add_protocol(parser, suite.LENGTHS)
    parser.add_argument("--lrs", type=float, nargs="+", default=[1e-3, 3e-3])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--models", nargs="+", choices=list(suite.MODELS), default=list(suite.MODELS))
    args = parser.parse_args()
    results = execute(Path(__file__).stem, args, plan)
    if args.plot:
        from hf_memmix.training.experiments.echo_plots import plot_transfer

        plot_transfer(results, args.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
