"""COFFEE as a language model beside Mamba-2, gated linear attention, GKA and a transformer: equal size, equal data.

    python training/experiments/coffee/language.py --text text.npy --out coffee_language.json

Text, sizes and the choice of learning rates are those of `lattice/language.py`; the paper trains no language model.
"mamba2" is the successor of S6, with the block of its paper. All mixers are used in the same Llama, whose MLP is made
smaller so that all models have the same size.
"""

import typer

from hf_memmix.training.experiments.common.fit import MODELS, train_language_model
from hf_memmix.training.experiments.common.language import Contexts, Models, run_command
from hf_memmix.training.experiments.common.options import (
    BatchTokens,
    Heads,
    HiddenSize,
    Layers,
    Out,
    Plot,
    Rates,
    Seconds,
    Tokens,
    TrainingText,
    Workers,
    settings,
)

COMPARED = ("coffee", "coffee-filter", "mamba2", "linear-decay", "gka", "transformer")


def run(row: dict, args) -> dict:
    return train_language_model(row, args, *MODELS[row["model"]])


def main(
    out: Out,
    text: TrainingText,
    plot: Plot = False,
    workers: Workers = 1,
    seconds: Seconds = float("inf"),
    hidden_size: HiddenSize = 256,
    layers: Layers = 4,
    heads: Heads = 4,
    batch_tokens: BatchTokens = 32768,
    tokens: Tokens = 16_000_000,
    contexts: Contexts = (512, 2048),
    lrs: Rates = (4e-3, 2e-3),
    models: Models = COMPARED,
) -> None:
    """Train every model and write the results."""
    args = settings(locals())
    run_command("coffee_language", __file__, args)


if __name__ == "__main__":
    typer.run(main)
