"""A comparison of language models at several context lengths."""

from typing import Annotated

import typer

from hf_memmix.training.experiments.common.fit import NAMES
from hf_memmix.training.experiments.common.harness import Experiment
from hf_memmix.training.experiments.common.options import LanguageModelOptions, Models, check_names
from hf_memmix.training.experiments.common.rates import plan
from hf_memmix.training.experiments.common.text import describe_training_text


class ComparisonOptions(LanguageModelOptions):
    contexts: Annotated[list[int], typer.Option(help="tokens of a sequence; repeatable")]
    models: Models


def rows_to_run(done: list[dict], args, seeds: tuple[int, ...] = (0, 1)) -> list[dict]:
    """Every learning rate at the shortest context, then the chosen rate at all contexts with every seed."""
    budgets = [{"context": context} for context in args.contexts]
    return plan(done, [{"model": name} for name in args.models], args.lrs, seeds, budgets)


def comparison(name: str, script: str, options: type, rows=rows_to_run) -> Experiment:
    """An experiment on language models. rows: see `Experiment`."""
    return Experiment(
        name,
        script,
        options,
        rows,
        check=lambda args: check_names("--models", args.models, NAMES),
        about=lambda args: describe_training_text(args.text),
    )
