"""Echo's transfer suite: a model is trained on two tasks at 64 tokens and measured on six tasks at up to 4096 tokens.

    python training/experiments/echo/transfer.py --workers 10 --out echo_transfer.json

The script repeats Tables 2 and 3 of the paper, with its three models of a million parameters and AdamW. The paper
takes 6,000 steps of 16 sequences. With these settings, three of eight models here had not yet learned recall when
their learning rate had decayed. Therefore the batches here are larger, and the rate decays only in the last part of
the training, for all models in the same way. Each learning rate runs with every seed. The rate of a model is the one
with the lowest mean loss on development sequences of the trained tasks.
"""

from collections.abc import Iterator

import typer

from hf_memmix.training.experiments.common.harness import Experiment
from hf_memmix.training.experiments.common.options import Models, Rates, check_names
from hf_memmix.training.experiments.echo import suite
from hf_memmix.training.experiments.echo.protocol import ProtocolOptions, learn_and_measure


def rows_to_run(done: list[dict], args) -> list[dict]:
    """Rows with every seed and rate, one model after another; SKA, the paper's mixer, comes first."""
    return [
        {"model": name, "lr": lr, "seed": seed}
        for name in reversed(args.models)
        for seed in range(args.seeds)
        for lr in args.lrs
    ]


def run(row: dict, args) -> Iterator[dict]:
    return learn_and_measure(row, args)


class Options(ProtocolOptions):
    lengths = suite.LENGTHS
    lrs: Rates = (1e-3, 3e-3)
    models: Models = tuple(suite.MODELS)


main = Experiment(
    "echo_transfer",
    __file__,
    Options,
    rows_to_run,
    lambda args: check_names("--models", args.models, suite.MODELS),
).command()


if __name__ == "__main__":
    typer.run(main)
