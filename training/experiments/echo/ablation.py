"""Which part of SKA helps? Varies the action mask, the place of the SKA layers, and options of these layers.

    python training/experiments/echo/ablation.py --lr 3e-3 --out echo_ablation.json

Each variant is the SKA model of `transfer.py` with one or two changes; training and measurement are the same as
there. All variants run with one seed before any runs with the next. With chunks of one token, every token reads all
tokens before it; this is the paper's prefix mode for questions that follow all facts. "last two layers" is the place
of SKA in the paper's synthetic experiments (section 3.4); the transfer suite has SKA in the inner two. "refreshed" in
a row holds the accuracies of the same model when the operator is estimated at every token (`refresh_every=1`); the
chunks of the training stay.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated

import typer

from hf_memmix.training.experiments.common.harness import Experiment
from hf_memmix.training.experiments.common.options import check_names
from hf_memmix.training.experiments.echo.protocol import ProtocolOptions, learn_and_measure


@dataclass(frozen=True)
class Variant:
    """A SKA model.

    ska: options of its SKA layers that differ from those of the transfer suite.
    masked: these layers get the true action mask and store the tokens of facts only, in training and in tests.
    layers: the mixer of each layer; None for SKA in the inner two.
    """

    ska: dict = field(default_factory=dict)
    masked: bool = True
    layers: tuple[str, ...] | None = None


LAST_TWO = ("mamba2", "mamba2", "ska", "ska")
VARIANTS = {
    "K = 2, chunks of 8": Variant(),
    "no action mask": Variant(masked=False),
    "no action mask, K = 1": Variant({"power": 1}, masked=False),
    "no action mask, last two layers": Variant(masked=False, layers=LAST_TWO),
    "last two layers": Variant(layers=LAST_TWO),
    "K = 0": Variant({"power": 0}),
    "K = 1": Variant({"power": 1}),
    "K = 4": Variant({"power": 4}),
    "no spectral norm": Variant({"spectral_norm": False}),
    "chunks of 1": Variant({"chunk_size": 1}),
    "chunks of 16": Variant({"chunk_size": 16}),
    "sequence maximum": Variant({"normalization": "sequence_max"}),
    "chunks of 32": Variant({"chunk_size": 32}),
}


def rows_to_run(done: list[dict], args) -> list[dict]:
    return [
        {"variant": name, "model": "ska", "lr": args.lr, "seed": seed}
        for seed in range(args.seeds)
        for name in args.variants
    ]


def run(row: dict, args) -> Iterator[dict]:
    variant = VARIANTS[row["variant"]]
    return learn_and_measure(row, args, variant.masked, variant.layers, **variant.ska)


class Options(ProtocolOptions):
    lengths = (64, 256, 1024, 4096)
    lr: Annotated[float, typer.Option(help="learning rate; default: the best of the transfer suite for SKA")] = 3e-3
    variants: Annotated[list[str], typer.Option(help="variants to compare; repeatable")] = tuple(VARIANTS)


main = Experiment(
    "echo_ablation",
    __file__,
    Options,
    rows_to_run,
    lambda args: check_names("--variants", args.variants, VARIANTS),
).command()


if __name__ == "__main__":
    typer.run(main)
