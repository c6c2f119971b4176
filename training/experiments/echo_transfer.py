"""Echo's transfer suite: train once on two tasks at 64 tokens, answer the same and four others, up to 4096 tokens.

    python training/experiments/echo_transfer.py --workers 6 --out training/results/echo_transfer.json --plot

Tables 2 and 3 of the paper at its sizes: three models of a million parameters, AdamW, 6,000 steps of 16 sequences.
Each learning rate runs with seed 0, further seeds at the rate of lowest loss on dev sequences of the trained tasks.
"""

import argparse
from collections.abc import Iterable, Iterator
from pathlib import Path

from hf_memmix.training.experiments import echo_suite as suite
from hf_memmix.training.experiments.echo_tasks import TASKS, check_task
from hf_memmix.training.experiments.fit import best
from hf_memmix.training.experiments.harness import execute, parser_of


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


def accuracies(model, grid: Iterable[tuple[str, int, int]], masked: bool, args: argparse.Namespace) -> list[list]:
    """[task, length, pairs, accuracy] for each cell."""
    return [
        [*cell, round(suite.measure(model, *cell, args.sequences, masked, suite.TEST_SEED)["accuracy"], 4)]
        for cell in grid
    ]


def learn_and_measure(row: dict, args: argparse.Namespace, masked: bool = True, **ska) -> dict:
    """Train the row's model, and its accuracy in every cell: "cells" [[task, length, pairs, accuracy]]."""
    model = suite.build(row["model"], row["seed"], **ska)
    masked = masked and row["model"] == "ska"
    batches = suite.training_batches(row["seed"], args.batch, args.length, args.pairs)
    result = suite.learn(model, batches, masked, row, args) | {"parameters": model.num_parameters()}
    if not result["finite"]:
        return result
    result["dev_loss"] = suite.training_loss(model, masked, args.length, args.pairs, args.sequences)
    result["cells"] = accuracies(model, cells(args), masked, args)
    result["decode_agreement"] = suite.decode_agreement(model, masked, args.length, min(args.pairs), args.sequences)
    if row["model"] == "ska" and ska.get("chunk_size") != 1 and ska.get("normalization") != "sequence_max":
        suite.set_ska(model, refresh_every=1)
        trained = (cell for cell in cells(args) if cell[0] in suite.TRAINED)
        result["refreshed"] = accuracies(model, trained, masked, args)
    return result


def plan(done: list[dict], args) -> list[dict]:
    rows = [{"model": name, "lr": lr, "seed": 0} for lr in args.lrs for name in args.models]
    for name in args.models:
        tried = [row for row in done if row["model"] == name and row["seed"] == 0]
        if len(tried) == len(args.lrs) and (row := best(tried)) is not None:
            rows += [{"model": name, "lr": row["lr"], "seed": seed} for seed in range(1, args.seeds)]
    return rows


def run(row: dict, args) -> dict:
    return learn_and_measure(row, args)


def add_protocol(parser: argparse.ArgumentParser, lengths: tuple[int, ...]) -> None:
    """Arguments of the training and the grid."""
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--batch", type=int, default=16, help="sequences of a step")
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
