"""Retrieval across a scratchpad: a system prompt of four facts, a gap of noise, four questions (the paper's Figure 3).

    python training/experiments/echo/scratchpad.py --workers 3 --streams 4 --out echo_scratchpad.json --plot

The paper's appendix shows the training curves of its Mamba-3 baseline and of SKA with two scales of its output, eta,
in an easy tier (a gap of 10 to 30 tokens) and a hard one (150 to 300 tokens). The values of eta are not in the text
of the paper that we have; here they are that of the preset and twice that. The gap is the tier's longest. As in the
paper SKA is in the last two of four layers, training takes 2000 steps of 16 sequences, and SKA gets the true action
mask; "no mask" is SKA without it. The learning rate is the one with the lowest loss on development sequences with one
seed.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

import torch
import typer

from hf_memmix.command_options import command
from hf_memmix.mixers.ska import ETA, SKAMixer
from hf_memmix.training.experiments.common.harness import attempt, execute
from hf_memmix.training.experiments.common.options import PlottedOptions, Rates, Steps, check_names, draw_if_asked
from hf_memmix.training.experiments.common.rates import rates_to_try
from hf_memmix.training.experiments.echo import suite
from hf_memmix.training.experiments.echo.plots import plot_scratchpad
from hf_memmix.training.experiments.echo.tasks import TASKS, Examples, draw_examples

PAIRS = 4
GAPS = {"easy": 30, "hard": 300}  # tokens
LAST_TWO = ("mamba2", "mamba2", "ska", "ska")


@dataclass(frozen=True)
class Variant:
    """A model of `suite.MODELS`; for SKA: the scale of its output before training, and whether it gets the mask."""

    model: str = "ska"
    eta: float = ETA
    masked: bool = True


VARIANTS = {
    "ssm": Variant("ssm", masked=False),
    "attention": Variant("attention", masked=False),
    "ska, eta 1.5": Variant(),
    "ska, eta 3": Variant(eta=2 * ETA),
    "ska, eta 1.5, no mask": Variant(masked=False),
    "ska, eta 3, no mask": Variant(eta=2 * ETA, masked=False),
}


def tier_length(tier: str) -> int:
    return TASKS["system_prompt"][1](PAIRS) + GAPS[tier]


def batches(row: dict, batch: int) -> Iterator[Examples]:
    length, generator = tier_length(row["tier"]), suite.seeded_generator(row["seed"])
    while True:
        drawn = draw_examples("system_prompt", batch * suite.BATCHES_PER_DRAW, length, PAIRS, generator)
        yield from (drawn[i * batch : (i + 1) * batch] for i in range(suite.BATCHES_PER_DRAW))


def rows_to_run(done: list[dict], args) -> list[dict]:
    """The rows of all rates with one seed, then the best rate with the other seeds."""
    rows, chosen = [], []
    for tier in GAPS:
        for name in args.variants:
            kind = {"variant": name, "tier": tier}
            lrs, lr = rates_to_try(done, args.lrs, **kind, seed=0)
            rows += [(lrs.index(rate), {**kind, "lr": rate, "seed": 0}) for rate in lrs]
            chosen += [] if lr is None else [{**kind, "lr": lr}]
    rows = [row for _, row in sorted(rows, key=lambda pair: pair[0])]
    return rows + [{**row, "seed": seed} for seed in range(1, args.seeds) for row in chosen]


def run(row: dict, args) -> Iterator[dict]:
    variant, length, errors = VARIANTS[row["variant"]], tier_length(row["tier"]), {}
    model = suite.build(variant.model, row["seed"], LAST_TWO if variant.model == "ska" else None)
    set_eta(model, variant.eta)
    result = suite.learn(model, batches(row, args.batch), variant.masked, row, args)
    yield result | {"parameters": model.num_parameters()}
    if not result["finite"]:
        return
    for name, seed, figure in (("dev_loss", suite.DEV_SEED, "loss"), ("accuracy", suite.TEST_SEED, "accuracy")):
        sizes = ("system_prompt", length, PAIRS, args.sequences, variant.masked, seed)
        found = attempt(errors, name, suite.measure, model, *sizes)
        yield {} if found is None else {name: found[figure]}
    if errors:
        yield {"errors": errors}


@torch.no_grad()
def set_eta(model, eta: float) -> None:
    """Set the scale of the output of every SKA layer."""
    for layer in model.modules():
        if isinstance(layer, SKAMixer):
            layer.eta.fill_(eta)


class Options(PlottedOptions):
    steps: Steps = 2000
    batch: Annotated[int, typer.Option(help="sequences per step")] = 16
    sequences: Annotated[int, typer.Option(help="sequences measured, at least")] = 512
    lrs: Rates = (3e-3, 1e-3)
    seeds: int = 3
    variants: Annotated[list[str], typer.Option(help="models to compare; repeatable")] = tuple(VARIANTS)


@command(Options)
def main(args) -> None:
    """Train every model in both tiers and write the results."""
    check_names("--variants", args.variants, VARIANTS)
    results = execute("echo_scratchpad", __file__, args, rows_to_run)
    draw_if_asked(args, plot_scratchpad, results)


if __name__ == "__main__":
    typer.run(main)
