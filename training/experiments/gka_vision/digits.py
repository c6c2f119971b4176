"""GKAVision, its backbone with other mixers, and a ViT classify 5,000 digits of MNIST.

    python training/experiments/gka_vision/digits.py --images mnist_5k.npz --out digits.json --workers 4

`make_images.py` writes the images. They are padded to 32 x 32 pixels, shifted at random in training, and enlarged to
128 x 128, so that the last two stages have 8 x 8 and 4 x 4 tokens. All models have equal parameters (`models.py`).
The learning rate is chosen by the loss on development images with seed 0; the accuracy on test images is reported.
Both are measured with statistics of BatchNorm that the training images give anew after the training, because the
running ones may not fit the last weights; "accuracy_running" is the accuracy with those.
"""

import math

import typer

from hf_memmix.training.experiments.common.harness import Experiment
from hf_memmix.training.experiments.common.mnist import CLASSES
from hf_memmix.training.experiments.common.options import (
    ImageBatch,
    Images,
    Models,
    Options,
    Rates,
    Steps,
    check_names,
)
from hf_memmix.training.experiments.common.rates import plan
from hf_memmix.training.experiments.gka_vision.classifiers import (
    load_digits,
    measure,
    measure_statistics_again,
    trained,
)
from hf_memmix.training.experiments.gka_vision.models import MODELS

SEEDS = (0, 1, 2)


def rows_to_run(done: list[dict], args) -> list[dict]:
    return plan(done, [{"model": name} for name in args.models], args.lrs, SEEDS)


def run(row: dict, args) -> dict:
    digits = load_digits(args.images)
    model, result = trained(row, args, digits)
    if not result["finite"]:
        return result
    running = measure(model, *digits["test"])[1]
    if measure_statistics_again(model, digits["train"][0]):
        result["accuracy_running"] = running
    found = {name: measure(model, *digits[name]) for name in ("dev", "test")}
    return result | {
        "dev_loss": found["dev"][0],
        "dev_accuracy": found["dev"][1],
        "test_loss": found["test"][0],
        "accuracy": found["test"][1],
    }


class DigitOptions(Options):
    images: Images
    steps: Steps = 300
    batch_size: ImageBatch = 256
    lrs: Rates = (1e-3, 2e-3, 4e-3)
    models: Models = MODELS


def check(args) -> None:
    check_names("--models", args.models, MODELS)
    load_digits(args.images)  # a wrong file is refused before the first process starts


main = Experiment(
    "gka_vision_digits", __file__, DigitOptions, rows_to_run, check, lambda args: {"chance_loss": math.log(CLASSES)}
).command()


if __name__ == "__main__":
    typer.run(main)
