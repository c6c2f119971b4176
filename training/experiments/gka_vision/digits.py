"""GKAVision, its backbone with other mixers, and a ViT classify 5,000 digits of MNIST.

    python training/experiments/gka_vision/digits.py --images mnist_5k.npz --out digits.json --workers 4

`make_digits.py` writes the images. They are padded to 32 x 32 pixels, shifted at random in training, and enlarged to
128 x 128, so that the last two stages have 8 x 8 and 4 x 4 tokens. All models have equal parameters (`models.py`).
The learning rate is chosen by the loss on development images with seed 0; the accuracy on test images is reported.
"""

import math
from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F
import typer
from torch import Tensor

from hf_memmix.command_options import command
from hf_memmix.training.experiments.common.fit import autocast, fit
from hf_memmix.training.experiments.common.harness import device, execute
from hf_memmix.training.experiments.common.mnist import CLASSES, SIZE, read_parts, shifted
from hf_memmix.training.experiments.common.options import Options, Rates, Steps, check_names
from hf_memmix.training.experiments.common.rates import rates_to_try
from hf_memmix.training.experiments.gka_vision.models import MODELS, SMALL, build

SEEDS = (0, 1, 2)
PADDING, ENLARGED = 2, 4


def load_digits(path: Path) -> dict[str, tuple[Tensor, Tensor]]:
    """Images in [-1, 1] [N, 1, 32, 32] and labels [N] of "train", "dev" and "test"; errors as in `read_parts`."""
    return {
        name: (F.pad(images[:, None].float() / 127.5 - 1, [PADDING] * 4, value=-1.0), labels)
        for name, (images, labels) in read_parts(path).items()
    }


def enlarged(images: Tensor) -> Tensor:
    return F.interpolate(images, scale_factor=ENLARGED, mode="bilinear")


@torch.no_grad()
def measure(model, images: Tensor, labels: Tensor) -> tuple[float, float]:
    """Loss and accuracy."""
    model.eval()
    with autocast():
        logits = torch.cat([model(enlarged(part)).logits for part in images.split(250)]).float()
    return F.cross_entropy(logits, labels).item(), (logits.argmax(-1) == labels).float().mean().item()


def rows_to_run(done: list[dict], args) -> list[dict]:
    rows, seeds = [], []
    for name in args.models:
        lrs, chosen = rates_to_try(done, args.lrs, model=name, seed=0)
        rows += [(lrs.index(lr), {"model": name, "lr": lr, "seed": 0}) for lr in lrs]
        seeds += [{"model": name, "lr": chosen, "seed": seed} for seed in SEEDS if chosen is not None]
    return [row for _, row in sorted(rows, key=lambda pair: pair[0])] + seeds


def run(row: dict, args) -> dict:
    digits, size = load_digits(args.images), (SIZE + 2 * PADDING) * ENLARGED
    common = {"image_size": size, "num_channels": 1, "num_labels": CLASSES}
    model = build(row["model"], SMALL, row["seed"], **common).to(device())
    images, labels = digits["train"]
    stream = torch.Generator(device()).manual_seed(row["seed"])

    def batch_of(step):
        index = torch.randint(len(images), (args.batch_size,), generator=stream, device=images.device)
        return enlarged(shifted(images[index, 0], PADDING, -1.0, stream)[:, None]), labels[index]

    def loss_of(x, y):
        return F.cross_entropy(model(x).logits.float(), y)

    result = fit(model, loss_of, args.steps, row["lr"], args, batch_of)
    result["parameters"] = model.num_parameters()
    if not result["finite"]:
        return result
    found = {name: measure(model, *digits[name]) for name in ("dev", "test")}
    return result | {
        "dev_loss": found["dev"][0],
        "dev_accuracy": found["dev"][1],
        "test_loss": found["test"][0],
        "accuracy": found["test"][1],
    }


class DigitOptions(Options):
    images: Annotated[Path, typer.Option(help="the .npz file that make_digits.py wrote")]
    steps: Steps = 300
    batch_size: Annotated[int, typer.Option(help="images per optimizer step")] = 256
    lrs: Rates = (1e-3, 2e-3, 4e-3)
    models: Annotated[list[str], typer.Option(help="models to compare; repeatable")] = MODELS


@command(DigitOptions)
def main(args) -> None:
    """Train every model with three seeds and write the results."""
    check_names("--models", args.models, MODELS)
    load_digits(args.images)  # a wrong file is refused before the first process starts
    execute("gka_vision_digits", __file__, args, rows_to_run, chance_loss=math.log(CLASSES))


if __name__ == "__main__":
    typer.run(main)
