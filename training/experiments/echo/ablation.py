"""Which part of SKA helps? Varies the action mask, the power, the spectral norm, the normalisation and the chunk size.

    python training/experiments/echo/ablation.py --lr 3e-3 --out echo_ablation.json --plot

Each variant is the SKA model of `transfer.py` with one option changed; training and measurement are the same as there.
All variants run with one seed before any runs with the next. With chunks of one token, every token reads all tokens
before it; this is the paper's prefix mode for questions that follow all facts. "refreshed" in a row holds the
accuracies of the same model when the operator is estimated at every token (`refresh_every=1`); the chunks of the
training stay.
"""

from collections.abc import Iterator
from typing import Annotated

import typer

from hf_memmix.command_options import command
from hf_memmix.training.experiments.common.harness import execute
from hf_memmix.training.experiments.common.options import check_names, draw_if_asked
from hf_memmix.training.experiments.echo.plots import plot_ablation
from hf_memmix.training.experiments.echo.protocol import ProtocolOptions, learn_and_measure

# the name of a variant: options of its SKA layers, and whether these layers store the tokens of facts only
VARIANTS = {
    "K = 2, chunks of 8": ({}, True),
    "no action mask": ({}, False),
    "K = 0": ({"power": 0}, True),
    "K = 1": ({"power": 1}, True),
    "K = 4": ({"power": 4}, True),
    "no spectral norm": ({"spectral_norm": False}, True),
    "chunks of 1": ({"chunk_size": 1}, True),
    "chunks of 16": ({"chunk_size": 16}, True),
    "sequence maximum": ({"normalization": "sequence_max"}, True),
    "chunks of 32": ({"chunk_size": 32}, True),
}


def rows_to_run(done: list[dict], args) -> list[dict]:
    return [
        {"variant": name, "model": "ska", "lr": args.lr, "seed": seed}
        for seed in range(args.seeds)
        for name in args.variants
    ]


def run(row: dict, args) -> Iterator[dict]:
    options, masked = VARIANTS[row["variant"]]
    return learn_and_measure(row, args, masked, **options)


class Options(ProtocolOptions):
    lengths = (64, 256, 1024, 4096)
    lr: Annotated[float, typer.Option(help="learning rate; default: the best of the transfer suite for SKA")] = 3e-3
    variants: Annotated[list[str], typer.Option(help="variants to compare; repeatable")] = tuple(VARIANTS)


@command(Options)
def main(args) -> None:
    """Train every variant and write the results."""
    check_names("--variants", args.variants, VARIANTS)
    results = execute("echo_ablation", __file__, args, rows_to_run)
    draw_if_asked(args, plot_ablation, results)


if __name__ == "__main__":
    typer.run(main)
