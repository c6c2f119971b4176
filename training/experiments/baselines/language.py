"""Compares all mixers as language models with one protocol: the warm-up that a transformer needs, and three seeds.

    python training/experiments/baselines/language.py --text text.npy --out baselines_language.json

Text, sizes and the choice of learning rates are those of `lattice/language.py`; there the warm-up of 24 steps is too
short for a transformer. "-vconv" in the name of a model means that v also passes through a short convolution, as in
GKA, GLA and Mamba-2, where v is called x; "-no-vconv" that it does not, and "-equal" that the memory has as many
numbers as that of Lattice (`fit.EQUAL_MEMORY`).
"""

from types import SimpleNamespace

import typer

from hf_memmix.training.experiments.common.fit import model_of, train_language_model
from hf_memmix.training.experiments.common.language import ComparisonOptions, comparison, rows_to_run
from hf_memmix.training.experiments.common.options import WarmupSteps

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
    rows = []
    for group in GROUPS:
        of_group = SimpleNamespace(**vars(args) | {"models": [name for name in args.models if name in group]})
        rows += rows_to_run(done, of_group, SEEDS)
    return rows


def run(row: dict, args) -> dict:
    return train_language_model(row, *model_of(row["model"], args), warmup_steps=args.warmup_steps)


class Options(ComparisonOptions):
    contexts = (512,)
    models = COMPARED
    lrs = (4e-3, 8e-3)
    warmup_steps: WarmupSteps = 150


main = comparison("baselines_language", __file__, Options, rows_by_importance).command()


if __name__ == "__main__":
    typer.run(main)
