"""Curves of recall by training step, in the tiers and with the scales of SKA's output of the paper's appendix.

    python training/experiments/echo/scratchpad.py --steps 6000 --streams 6 --out echo_scratchpad.json --plot
    python training/experiments/echo/scratchpad.py --tiers "tools, easy" --tiers "tools, hard" --steps 2500 \\
        --variants ssm --variants "ska, eta 0.75" --variants "ska, eta 1.5" --variants "ska, eta 3" \\
        --variants "ska, eta 6" --streams 6 --out echo_dose.json --plot

Chain of thought (Figure 3): a system prompt of four facts, a gap of noise of 30 tokens (easy; the paper: 10 to 30) or
300 (hard; 150 to 300), and four questions. Tool calls: a history of 20 calls (easy; 10 to 30) or 60 (hard; 60 to 120)
and four questions about them. The paper asks one question, and compares its Mamba-3 baseline with SKA at two scales
of its output, eta, "to demonstrate a dose-response relationship". Eta is learned and starts at 1.5; the value of the
stronger one and the learning rate are missing in the text of the paper that we have. Here eta starts at half of the
standard, the standard, twice and four times it, and the rates run with one seed until one solves the tier
(`suite.SOLVED`). As in the paper SKA is in the last two of four layers, a step has 16 sequences, training takes 6,000
steps with chains of thought and 2,500 with tools, the accuracy is taken every 250 steps, and SKA gets the true action
mask; "no mask" is SKA without it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

import torch
import typer

from hf_memmix.command_options import command
from hf_memmix.mixers.ska import ETA, SKAMixer
from hf_memmix.training.experiments.common.harness import attempt, execute
from hf_memmix.training.experiments.common.options import (
    FurtherRates,
    PlottedOptions,
    Points,
    PointsBelow,
    Rates,
    Steps,
    check_names,
    draw_if_asked,
)
from hf_memmix.training.experiments.common.rates import rows_until_solved
from hf_memmix.training.experiments.echo import suite
from hf_memmix.training.experiments.echo.plots import plot_scratchpad
from hf_memmix.training.experiments.echo.tasks import TASKS, Examples, draw_examples

LAST_TWO = ("mamba2", "mamba2", "ska", "ska")


@dataclass(frozen=True)
class Tier:
    """A task of `tasks.py` with so many facts, and the tokens of noise in a sequence."""

    task: str
    pairs: int
    noise: int = 0

    @property
    def length(self) -> int:
        return TASKS[self.task][1](self.pairs) + self.noise


@dataclass(frozen=True)
class Variant:
    """A model of `suite.MODELS`; for SKA: the scale of its output before training, and whether it gets the mask."""

    model: str = "ska"
    eta: float = ETA
    masked: bool = True


TIERS = {
    "easy": Tier("system_prompt", 4, noise=30),
    "hard": Tier("system_prompt", 4, noise=300),
    "tools, easy": Tier("tool_trace", 20),
    "tools, hard": Tier("tool_trace", 60),
}
VARIANTS = {
    "ska, eta 1.5": Variant(),
    "ska, eta 3": Variant(eta=2 * ETA),
    "ssm": Variant("ssm", masked=False),
    "ska, eta 1.5, no mask": Variant(masked=False),
    "ska, eta 3, no mask": Variant(eta=2 * ETA, masked=False),
    "ska, eta 0.75": Variant(eta=ETA / 2),
    "ska, eta 6": Variant(eta=4 * ETA),
    "attention": Variant("attention", masked=False),
}
CHAINS, COMPARED = ("easy", "hard"), ("ska, eta 1.5", "ska, eta 3", "ssm", "ska, eta 1.5, no mask")


def batches(row: dict, batch: int) -> Iterator[Examples]:
    tier, generator = TIERS[row["tier"]], suite.seeded_generator(row["seed"])
    while True:
        drawn = draw_examples(tier.task, batch * suite.BATCHES_PER_DRAW, tier.length, tier.pairs, generator)
        yield from (drawn[i * batch : (i + 1) * batch] for i in range(suite.BATCHES_PER_DRAW))


def rows_to_run(done: list[dict], args) -> list[dict]:
    """First rates of all models and tiers, then in turns further rates and, where the rate is known, other seeds."""
    kinds = [{"variant": name, "tier": tier} for name in args.variants for tier in args.tiers]
    return rows_until_solved(done, kinds, suite.SOLVED, args)


def run(row: dict, args) -> Iterator[dict]:
    variant, tier, errors = VARIANTS[row["variant"]], TIERS[row["tier"]], {}
    model = suite.build(variant.model, row["seed"], LAST_TWO if variant.model == "ska" else None)
    set_eta(model, variant.eta)
    enough = {"stop_below_loss": args.enough, "points": args.points, "points_below": args.points_below}
    result = suite.learn(model, batches(row, args.batch), variant.masked, row, args, args.accuracy_every, **enough)
    yield result | {"parameters": model.num_parameters()}
    if not result["finite"]:
        return
    for name, seed, figure in (("dev_loss", suite.DEV_SEED, "loss"), ("accuracy", suite.TEST_SEED, "accuracy")):
        sizes = (tier.task, tier.length, tier.pairs, args.sequences, variant.masked, seed)
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
    steps: Steps = 6000
    batch: Annotated[int, typer.Option(help="sequences per step")] = 16
    accuracy_every: Annotated[int, typer.Option(help="steps between two accuracies of the training curve")] = 250
    enough: Annotated[float, typer.Option(help="the loss at which training ends; 0: never")] = 0.0
    points: Points = 20
    points_below: PointsBelow = 1
    sequences: Annotated[int, typer.Option(help="sequences measured, at least")] = 512
    lrs: Rates = (2e-3, 1e-3, 4e-3)
    further_rates: FurtherRates = 0
    seeds: int = 3
    tiers: Annotated[list[str], typer.Option(help="tiers to train in; repeatable")] = CHAINS
    variants: Annotated[list[str], typer.Option(help="models to compare; repeatable")] = COMPARED


@command(Options)
def main(args) -> None:
    """Train every model in every tier and write the results."""
    check_names("--variants", args.variants, VARIANTS)
    check_names("--tiers", args.tiers, TIERS)
    results = execute("echo_scratchpad", __file__, args, rows_to_run)
    draw_if_asked(args, plot_scratchpad, results)


if __name__ == "__main__":
    typer.run(main)
