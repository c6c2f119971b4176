"""A comparison of language models at several context lengths: its rows, and the function that runs them."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated

import typer

from hf_memmix.training.experiments.common.fit import NAMES
from hf_memmix.training.experiments.common.harness import execute
from hf_memmix.training.experiments.common.options import LanguageModelOptions, check_names, draw_if_asked
from hf_memmix.training.experiments.common.plots import plot_language
from hf_memmix.training.experiments.common.rates import rates_to_try
from hf_memmix.training.experiments.common.text import describe_training_text

SEEDS = (0, 1)


class ComparisonOptions(LanguageModelOptions):
    contexts: Annotated[list[int], typer.Option(help="tokens of a sequence; repeatable")]
    models: Annotated[list[str], typer.Option(help="models to compare; repeatable")]


def rows_to_run(done: list[dict], args, seeds: tuple[int, ...] = SEEDS) -> list[dict]:
    """Rows with every learning rate at the shortest context, then the chosen rate at all contexts with every seed."""
    first, rows, chosen = args.contexts[0], [], {}
    for name in args.models:
        lrs, chosen[name] = rates_to_try(done, args.lrs, model=name, context=first, seed=0)
        rows += [(lrs.index(lr), {"model": name, "context": first, "lr": lr, "seed": 0}) for lr in lrs]
    # all models run with one rate before any runs with the next, so a time limit leaves out the same rates of all
    rows = [row for _, row in sorted(rows, key=lambda pair: pair[0])]
    for seed in seeds:
        for context in args.contexts:
            rows += [
                {"model": name, "context": context, "lr": lr, "seed": seed}
                for name, lr in chosen.items()
                if lr is not None
            ]
    return rows


def run_command(
    name: str,
    script: str,
    args: SimpleNamespace,
    rows: Callable = rows_to_run,
    plot: Callable[[dict, Path], None] = plot_language,
) -> None:
    """Run an experiment on language models and draw its plot if `args.plot` is set. rows: see `harness.execute`."""
    check_names("--models", args.models, NAMES)
    results = execute(name, script, args, rows, **describe_training_text(args.text))
    draw_if_asked(args, plot, results)
