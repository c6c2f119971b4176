"""Images as sequences: one layer reads the 784 pixels of a digit one by one, and the classes are read from the end.

    python training/experiments/coffee/pixels.py --images mnist_5k.npz --out pixels.json --workers 8

A pixel is a token, its grey level. The model is this package's sequence classifier: a Llama of one layer with a mixer
in place of attention, whose output at the last pixel is classified. The layer has the sizes of Table 7 of the COFFEE
paper, 25 features with 2 states each; the width of the MLP gives all models about `PARAMETERS` parameters.
`gka_vision/make_digits.py` writes the images; they are shifted at random in training. The learning rate is chosen by
the loss on development images with seed 0; the accuracy on test images is reported.
"""

import math
from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F
import typer
from torch import Tensor
from transformers import AutoModelForSequenceClassification, LlamaConfig

from hf_memmix import memmix_config
from hf_memmix.command_options import command
from hf_memmix.training.experiments.coffee import s6_mixer  # noqa: F401, registers "s6"
from hf_memmix.training.experiments.coffee.plots import plot_pixels
from hf_memmix.training.experiments.common.fit import autocast, fit
from hf_memmix.training.experiments.common.harness import device, execute
from hf_memmix.training.experiments.common.mnist import CLASSES, SIZE, read_parts, shifted
from hf_memmix.training.experiments.common.options import (
    PlottedOptions,
    Rates,
    Steps,
    check_names,
    draw_if_asked,
)
from hf_memmix.training.experiments.common.rates import rates_to_try

SEEDS = (0, 1, 2, 3, 4)
LEVELS = 16  # of grey; the last token is the padding, which no image has
SHIFT = 2  # pixels
PARAMETERS = 5885  # of S6 with 2 states in `images.py`
STATES = 2
MODELS = {
    "coffee": ("coffee", {"states": STATES}),
    "coffee-filter": ("coffee", {"states": STATES, "use_output_filter": True}),
    "s6": ("s6", {"states": STATES}),
    "mamba2": ("mamba2", {"state_size": STATES, "expand": 1, "head_dim": 5}),
}


def configured(name: str, hidden: int, intermediate: int):
    mixer, options = MODELS[name]
    sizes = {} if mixer == "mamba2" else {"inner_size": hidden}
    backbone = LlamaConfig(
        vocab_size=LEVELS + 1,
        pad_token_id=LEVELS,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=hidden + hidden % 2,
        max_position_embeddings=SIZE**2,
        num_labels=CLASSES,
    )
    return memmix_config(backbone, mixer_types=[mixer], mixers={mixer: options | sizes})


def build(name: str, hidden: int, seed: int):
    """A classifier with about `PARAMETERS` parameters.

    Raises:
        ValueError: the layer alone has more.
    """
    with torch.device("meta"):
        narrow = AutoModelForSequenceClassification.from_config(configured(name, hidden, 1)).num_parameters()
    width = 1 + round((PARAMETERS - narrow) / (3 * hidden))
    if width < 1:
        raise ValueError(f"{name} with {hidden} features has {narrow} parameters, more than {PARAMETERS}")
    torch.manual_seed(seed)
    return AutoModelForSequenceClassification.from_config(configured(name, hidden, width)).to(device())


def pixels(images: Tensor) -> Tensor:
    """Grey levels int64 [N, 784] of images uint8 [N, 28, 28], row by row."""
    return (images.flatten(1).long() * LEVELS) // 256


@torch.no_grad()
def measure(model, images: Tensor, labels: Tensor) -> tuple[float, float]:
    """Loss and accuracy."""
    model.eval()
    with autocast():
        logits = torch.cat([model(pixels(part), use_cache=False).logits for part in images.split(250)]).float()
    return F.cross_entropy(logits, labels).item(), (logits.argmax(-1) == labels).float().mean().item()


def rows_to_run(done: list[dict], args) -> list[dict]:
    rows, seeds = [], []
    for name in args.models:
        lrs, chosen = rates_to_try(done, args.lrs, model=name, seed=0)
        rows += [(lrs.index(lr), {"model": name, "lr": lr, "seed": 0}) for lr in lrs]
        seeds += [(seed, {"model": name, "lr": chosen, "seed": seed}) for seed in SEEDS if chosen is not None]
    return [row for part in (rows, seeds) for _, row in sorted(part, key=lambda pair: pair[0])]


def run(row: dict, args) -> dict:
    parts = read_parts(args.images)
    model = build(row["model"], args.hidden_size, row["seed"])
    images, labels = parts["train"]
    stream = torch.Generator(device()).manual_seed(row["seed"])

    def batch_of(step):
        index = torch.randint(len(images), (args.batch_size,), generator=stream, device=images.device)
        return pixels(shifted(images[index], SHIFT, 0, stream)), labels[index]

    def loss_of(x, y):
        return F.cross_entropy(model(x, use_cache=False).logits.float(), y)

    result = fit(model, loss_of, args.steps, row["lr"], args, batch_of) | {"parameters": model.num_parameters()}
    if not result["finite"]:
        return result
    found = {name: measure(model, *parts[name]) for name in ("dev", "test")}
    return result | {"dev_loss": found["dev"][0], "test_loss": found["test"][0], "accuracy": found["test"][1]}


class PixelOptions(PlottedOptions):
    images: Annotated[Path, typer.Option(help="the .npz file that gka_vision/make_digits.py wrote")]
    steps: Steps = 1500
    batch_size: Annotated[int, typer.Option(help="images per optimizer step")] = 128
    hidden_size: Annotated[int, typer.Option(help="features of the layer")] = 25
    lrs: Rates = (5e-3, 1e-2, 2e-2)
    models: Annotated[list[str], typer.Option(help="models to compare; repeatable")] = tuple(MODELS)


@command(PixelOptions)
def main(args) -> None:
    """Train every model with five seeds and write the results."""
    check_names("--models", args.models, MODELS)
    read_parts(args.images)  # a wrong file is refused before the first process starts
    results = execute("coffee_pixels", __file__, args, rows_to_run, chance_loss=math.log(CLASSES))
    draw_if_asked(args, plot_pixels, results)


if __name__ == "__main__":
    typer.run(main)
