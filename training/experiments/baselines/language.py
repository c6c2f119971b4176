"""Compares all mixers as language models with one protocol: the warm-up that a transformer needs, and three seeds.

    python training/experiments/baselines/language.py --text text.npy --out baselines_language.json

At the shortest context each model is trained with every learning rate (`rates_to_try`). The rate with the lowest dev
loss is used for the longer contexts and for further seeds. The reported figure is the perplexity on held-out text.
"-vconv" in the name of a model means that v also passes through a short convolution, as in GKA, GLA and Mamba-2, where
v is called x; "-no-vconv" that it does not, and "-equal" that the memory has as many numbers as that of Lattice
(`fit.EQUAL_MEMORY`).
"""

from types import SimpleNamespace
from typing import Annotated

import typer

from hf_memmix.training.experiments.common.fit import NAMES, model_of, train_language_model
from hf_memmix.training.experiments.common.harness import Experiment
from hf_memmix.training.experiments.common.options import LanguageModelOptions, Models, WarmupSteps, check_names
from hf_memmix.training.experiments.common.rates import plan
from hf_memmix.training.experiments.common.text import describe_training_text

SEEDS = (0, 1, 2)
GROUPS = (  # in the order of their importance
    ("transformer", "gka", "gdn", "dec", "mamba2", "gla", "delta", "linear-decay", "coffee"),
    ("mamba2-equal", "gka-equal", "coffee-equal"),
    ("dec-vconv", "gdn-vconv", "delta-vconv", "gka-no-vconv"),
    ("mamba2-no-vconv-equal", "gla-no-vconv", "linear-decay-vconv"),
    ("enc", "sim"),
)
COMPARED = sum(GROUPS, ())


def rows_by_importance(done: list[dict], args: SimpleNamespace) -> list[dict]:
    """All rates and seeds of a group of models come before those of the next group."""
    budgets, rows = [{"context": context} for context in args.contexts], []
    for group in GROUPS:
        rows += plan(done, [{"model": name} for name in args.models if name in group], args.lrs, SEEDS, budgets)
    return rows


def run(row: dict, args) -> dict:
    return train_language_model(row, *model_of(row["model"], args), warmup_steps=args.warmup_steps)


class Options(LanguageModelOptions):
    contexts: Annotated[list[int], typer.Option(help="tokens of a sequence; repeatable")] = (512,)
    models: Models = COMPARED
    lrs = (4e-3, 8e-3)
    warmup_steps: WarmupSteps = 150


main = Experiment(
    "baselines_language",
    __file__,
    Options,
    rows_by_importance,
    check=lambda args: check_names("--models", args.models, NAMES),
    about=lambda args: describe_training_text(args.text),
).command()


if __name__ == "__main__":
    typer.run(main)
