"""COFFEE as a language model beside Mamba-2, gated linear attention, GKA and a transformer: equal size, equal data.

    python training/experiments/coffee/language.py --text text.npy --out coffee_language.json

Text, sizes and the choice of learning rates are those of `lattice/language.py`; the paper trains no language model.
"mamba2" is the successor of S6, with the block of its paper. All mixers are used in the same Llama, whose MLP is made
smaller so that all models have the same size.
"""

import typer

from hf_memmix.training.experiments.common.fit import model_of, train_language_model
from hf_memmix.training.experiments.common.language import ComparisonOptions, comparison

COMPARED = ("coffee", "coffee-filter", "mamba2", "linear-decay", "gka", "transformer")


def run(row: dict, args) -> dict:
    return train_language_model(row, *model_of(row["model"], args))


class Options(ComparisonOptions):
    contexts = (512, 2048)
    models = COMPARED


main = comparison("coffee_language", __file__, Options).command()


if __name__ == "__main__":
    typer.run(main)
