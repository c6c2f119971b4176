"""How much the accuracy on clothes depends on the running statistics of BatchNorm.

    python training/experiments/gka_vision/batch_norm.py --images fashion_10k.npz --out batch_norm.json

With seed 2 the backbone with attention trains well and fails on new images (`results/fashion.json`). The command
trains it again, and another seed, as digits.py does. It measures the accuracy with the running statistics of the
training, with the statistics of each batch of images, and with running statistics that training images give anew.
"""

import math
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import nn

from hf_memmix.command_options import command
from hf_memmix.conversion.records import environment, write_json
from hf_memmix.training.experiments.common.fit import autocast
from hf_memmix.training.experiments.common.options import Out, Steps, check_names
from hf_memmix.training.experiments.gka_vision.classifiers import PART, enlarged, load_digits, measure, trained
from hf_memmix.training.experiments.gka_vision.models import MODELS

ABOUT = (
    "Accuracy of the backbone with attention on clothes after the training of digits.py: with the running statistics "
    "of BatchNorm in bf16 (accuracy) and fp32, with the statistics of each test batch of 250, on 1,000 training "
    "images, and with running statistics that 5,000 training images gave anew after the training."
)
TRAIN_IMAGES, IMAGES_OF_STATISTICS = 1000, 5000


class StatisticsOptions:
    out: Out
    images: Annotated[Path, typer.Option(help="the .npz file that make_fashion.py wrote")]
    model: Annotated[str, typer.Option(help="the mixer of the backbone")] = "attention"
    lr: float = 1e-3
    seeds: Annotated[list[int], typer.Option(help="seed of a training; repeatable")] = (2, 3)
    steps: Steps = 300
    batch_size: Annotated[int, typer.Option(help="images per optimizer step")] = 256


def norms_of(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]


@torch.no_grad()
def by_batch(model: nn.Module, images, labels) -> float:
    """Accuracy if BatchNorm takes the statistics of each part of `images`. The running statistics do not change."""
    norms = norms_of(model)
    kept = [(norm.running_mean, norm.running_var) for norm in norms]
    for norm in norms:
        norm.running_mean = norm.running_var = None  # then BatchNorm takes those of the batch
    accuracy = measure(model, images, labels)[1]
    for norm, (mean, variance) in zip(norms, kept, strict=True):
        norm.running_mean, norm.running_var = mean, variance
    return accuracy


@torch.no_grad()
def measure_statistics_again(model: nn.Module, images) -> None:
    """Replace the running statistics by the means over `images`."""
    model.eval()
    for norm in norms_of(model):
        norm.reset_running_stats()
        norm.momentum = None  # the mean over all batches
        norm.train()
    with autocast():
        for part in images.split(PART):
            model(enlarged(part))


def row_of(seed: int, args, digits: dict) -> dict:
    """The accuracies after one training. They are None if its loss is not finite."""
    row = {"model": args.model, "lr": args.lr, "seed": seed}
    model, result = trained(row, args, digits)
    if not result["finite"]:
        return {"seed": seed, "accuracy": None}
    loss, accuracy = measure(model, *digits["test"])
    images, labels = (part[:TRAIN_IMAGES] for part in digits["train"])
    found = {
        "seed": seed,
        "accuracy": accuracy,
        "test_loss": loss,
        "train_loss": result["curve"][-1][1],
        "batch_norms": len(norms_of(model)),
        "fp32": measure(model, *digits["test"], use_autocast=False)[1],
        "batch_statistics": by_batch(model, *digits["test"]),
        "train_images": measure(model, images, labels)[1],
    }
    measure_statistics_again(model, digits["train"][0][:IMAGES_OF_STATISTICS])
    return found | {"statistics_again": measure(model, *digits["test"])[1]}


@command(StatisticsOptions)
def main(args) -> None:
    """Train the model with every seed and write its accuracies."""
    check_names("--model", [args.model], MODELS)
    digits = load_digits(args.images)
    args.deadline = math.inf
    settings = {name: getattr(args, name) for name in ("model", "lr", "steps", "batch_size")}
    results = {"about": ABOUT, "environment": environment(), "settings": settings, "rows": []}
    for seed in args.seeds:
        results["rows"].append(row_of(seed, args, digits))
        write_json(args.out, results)
        print(results["rows"][-1], flush=True)


if __name__ == "__main__":
    typer.run(main)
