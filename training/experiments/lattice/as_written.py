"""Does Lattice's ENC train as the paper writes it? A small language model on a CPU, beside ENC with its two limits.

    python training/experiments/lattice/as_written.py --text hf_memmix/assets/train.txt --out enc_as_written.json

`LatticeMixer` gives v unit norm in ENC and limits the step gamma to 3/2, because the write of ENC is a least mean
squares step. "enc-as-written" has neither limit. Nothing is chosen here and no text is held out: the training loss and
the norm of the gradients, before they are clipped to 1, say whether a training is stable.
"""

import functools
from typing import Annotated

import typer

from hf_memmix.command_options import command
from hf_memmix.training.experiments.bundled.language_model import next_token_loss
from hf_memmix.training.experiments.common.fit import MODELS, build, fit
from hf_memmix.training.experiments.common.harness import device, execute
from hf_memmix.training.experiments.common.options import (
    Heads,
    HiddenSize,
    Layers,
    Options,
    Rates,
    Steps,
    TrainingText,
)
from hf_memmix.training.experiments.common.text import VOCAB, Windows, describe_training_text, train_tokens

COMPARED = ("enc", "enc-as-written")


def rows_to_run(done: list[dict], args) -> list[dict]:
    return [
        {"model": name, "lr": lr, "seed": seed} for seed in args.seeds for lr in args.lrs[::-1] for name in COMPARED
    ]


def run(row: dict, args) -> dict:
    model = build(args, *MODELS[row["model"]], vocab=VOCAB, context=args.context, seed=row["seed"])
    windows = Windows(train_tokens(args.text).to(device()), args.context, args.batch_size, row["seed"])
    loss_of = functools.partial(next_token_loss, model)
    result = fit(model, loss_of, args.steps, row["lr"], args, lambda step: (windows(step),))
    return result | {"parameters": model.num_parameters()}


class AsWrittenOptions(Options):
    text: TrainingText
    hidden_size: HiddenSize = 64
    layers: Layers = 2
    heads: Heads = 2
    context: Annotated[int, typer.Option(help="tokens of a sequence")] = 512
    batch_size: Annotated[int, typer.Option(help="sequences per optimizer step")] = 2
    steps: Steps = 60
    lrs: Rates = (4e-3, 8e-3, 1.6e-2)
    seeds: Annotated[list[int], typer.Option(help="seeds; repeatable")] = (0, 1)


@command(AsWrittenOptions)
def main(args) -> None:
    """Train both forms of ENC at every rate and write the results."""
    execute("enc_as_written", __file__, args, rows_to_run, **describe_training_text(args.text))


if __name__ == "__main__":
    typer.run(main)
