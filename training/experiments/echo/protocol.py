"""How the transfer suite and the ablation train a model on two tasks and measure it on six."""

from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Annotated

import typer

from hf_memmix.training.experiments.common.harness import attempt
from hf_memmix.training.experiments.common.options import Options, Steps
from hf_memmix.training.experiments.echo import suite
from hf_memmix.training.experiments.echo.tasks import TASKS, check_task


class ProtocolOptions(Options):
    steps: Steps = 5000
    batch: Annotated[int, typer.Option(help="sequences per step")] = 64
    length: Annotated[int, typer.Option(help="tokens of a training sequence")] = 64
    pairs: Annotated[list[int], typer.Option(help="pairs in training, in equal parts; repeatable")] = (2, 4, 8)
    lengths: Annotated[list[int], typer.Option(help="tokens of the measured sequences; repeatable")]
    sequences: Annotated[int, typer.Option(help="sequences measured per cell, at least")] = 128
    seeds: int = 3


def cells(args: SimpleNamespace) -> Iterator[tuple[str, int, int]]:
    """Every (task, length, pairs) whose facts and questions fit into the length."""
    for task in TASKS:
        for length in args.lengths:
            for pairs in suite.PAIRS if task != "niah" else (1,):
                try:
                    check_task(task, length, pairs)
                except ValueError:
                    continue
                yield task, length, pairs


def accuracies(model, grid: Iterable[tuple], masked: bool, args: SimpleNamespace, errors: dict) -> list[list]:
    """[task, length, pairs, accuracy] for each cell; a cell whose measurement fails adds its error to `errors`."""
    found = []
    for cell in grid:
        name = " ".join(map(str, cell))
        result = attempt(errors, name, suite.measure, model, *cell, args.sequences, masked, suite.TEST_SEED)
        found += [] if result is None else [[*cell, round(result["accuracy"], 4)]]
    return found


def learn_and_measure(
    row: dict, args: SimpleNamespace, masked: bool = True, layers: tuple[str, ...] | None = None, **ska
) -> Iterator[dict]:
    """Train the row's model and measure it; yields the parts of its results. Arguments as in `suite.build`.

    "cells" holds [task, length, pairs, accuracy] for every cell; "refreshed" the same for the trained tasks of a SKA
    model whose operator is estimated at every token.
    """
    model, errors = suite.build(row["model"], row["seed"], layers, **ska), {}
    masked = masked and row["model"] == "ska"
    batches = suite.training_batches(row["seed"], args.batch, args.length, args.pairs)
    result = suite.learn(model, batches, masked, row["lr"], args) | {"parameters": model.num_parameters()}
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
