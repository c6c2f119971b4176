"""Compares Lattice as a language model with other mixers, at equal size, with equal data, at several context lengths.

    python training/experiments/lattice/language.py --text text.npy --out lattice_language.json

At the shortest context each model is trained with every learning rate (`rates_to_try`). The rate with the lowest dev
loss is used for the longer contexts and for a second seed. The reported figure is the perplexity on held-out text.
Table 2 of Karami and Mirrokni is the same comparison at 110M parameters and 2.4B tokens. "-small" in the name of a
model means that its step size gamma is at most 0.25, "-vconv" that v also passes through a short convolution.
`baselines/language.py` compares fewer models with a longer warm-up, which the transformer needs.
"""

import typer

from hf_memmix.training.experiments.common.fit import model_of, train_language_model
from hf_memmix.training.experiments.common.language import ComparisonOptions, comparison

# Karami and Mirrokni, Table 2: perplexity on Books. All its recurrent models have the block of Lattice, so its Mamba-2
# is "linear-decay" here; "mamba2" is Mamba-2 in the block of its own paper
PAPER = {
    "transformer": {512: 20.60, 2048: 18.89, 8192: 18.85},
    "linear": {512: 21.04, 2048: 19.82, 8192: 20.34},
    "linear-decay": {512: 19.94, 2048: 18.34, 8192: 18.23},
    "delta": {512: 20.28, 2048: 18.33, 8192: 18.05},
    "gdn": {512: 19.76, 2048: 18.00, 8192: 17.40},
    "ttt": {512: 20.11, 2048: 18.36, 8192: 18.05},
    "dec": {512: 19.06, 2048: 17.14, 8192: 16.62},
    "enc": {512: 19.11, 2048: 17.22, 8192: 16.66},
    "sim": {512: 19.08, 2048: 17.23, 8192: 16.73},
}
# variants with gamma of at most 0.25, the best limit in the ablation
SMALL_STEPS = ("dec-small", "enc-small", "sim-small")
NOT_IN_PAPER = ("dec-vconv",)


def run(row: dict, args) -> dict:
    result = train_language_model(row, *model_of(row["model"], args))
    paper = PAPER.get(row["model"], {}).get(row["context"])
    return result | ({} if paper is None else {"paper_perplexity_on_books": paper})


class Options(ComparisonOptions):
    contexts = (512, 2048, 8192)
    models = (*PAPER, *SMALL_STEPS, *NOT_IN_PAPER)


main = comparison("lattice_language", __file__, Options).command()


if __name__ == "__main__":
    typer.run(main)
