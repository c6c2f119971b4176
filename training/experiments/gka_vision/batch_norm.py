"""How much the accuracy on clothes depends on the running statistics of BatchNorm.

    python training/experiments/gka_vision/batch_norm.py --images fashion_10k.npz --out batch_norm.json

With seed 2 the backbone with attention trains well and fails on new images (`results/fashion.json`). The command
trains it again, and another seed, as digits.py does. It measures the accuracy with the running statistics of the
training, with the statistics of each batch of images, and with running statistics that training images give anew.

It also looks for the cause. Every step moves a running statistic by a tenth towards that of its batch, so two running
statistics in a row give the batch's own one. The command records all of them. It asks each BatchNorm what it costs if
it alone has the running statistics and the others have the new ones.
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
    "images, and with running statistics that 5,000 training images gave anew after the training, without dropped "
    "paths (statistics_again) and with them, as in the training (statistics_with_drop_path). during: the step, and "
    "the accuracy on development images with running and with batch statistics. norms: alone, the accuracy if "
    "only this BatchNorm has its running statistics; alone_mean and alone_variance, only its running means or "
    "variances; the channel whose mean is off by the most of its standard deviations, and the smallest and largest "
    "ratio of running to new variance. history: for the BatchNorm with the lowest accuracy alone and its channel, per "
    "step the mean and the variance of the batch."
)
TRAIN_IMAGES, IMAGES_OF_STATISTICS = 1000, 5000
EVERY = 15  # steps between the accuracies of "during"
Statistics = tuple[torch.Tensor, torch.Tensor]  # the running means [C] and variances [C] of a BatchNorm


class StatisticsOptions:
    out: Out
    images: Annotated[Path, typer.Option(help="the .npz file that make_fashion.py wrote")]
    model: Annotated[str, typer.Option(help="the mixer of the backbone")] = "attention"
    lr: float = 1e-3
    seeds: Annotated[list[int], typer.Option(help="seed of a training; repeatable")] = (2, 3)
    steps: Steps = 300
    batch_size: Annotated[int, typer.Option(help="images per optimizer step")] = 256


def named_norms(model: nn.Module) -> dict[str, nn.Module]:
    return {n: module for n, module in model.named_modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)}


def norms_of(model: nn.Module) -> list[nn.Module]:
    return list(named_norms(model).values())


def statistics_of(model: nn.Module) -> dict[str, Statistics]:
    """Copies of the running statistics, by the name of the BatchNorm."""
    return {name: (norm.running_mean.clone(), norm.running_var.clone()) for name, norm in named_norms(model).items()}


def set_statistics(model: nn.Module, statistics: dict[str, Statistics]) -> None:
    for name, norm in named_norms(model).items():
        mean, variance = statistics[name]
        norm.running_mean.copy_(mean)
        norm.running_var.copy_(variance)


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
def measure_statistics_again(model: nn.Module, images, drop_path: bool = False) -> None:
    """Replace the running statistics by the means over `images`; `drop_path`: drop paths, as the training does."""
    model.train(drop_path)
    for norm in norms_of(model):
        norm.reset_running_stats()
        norm.momentum = None  # the mean over all batches
        norm.train()
    with autocast():
        for part in images.split(PART):
            model(enlarged(part))


class Watch:
    """Records the running statistics before every step, and the accuracies on development images at some steps."""

    def __init__(self, dev: tuple):
        self.dev, self.statistics, self.during = dev, [], []

    def __call__(self, model: nn.Module, step: int) -> None:
        self.statistics.append(statistics_of(model))
        if step and step % EVERY == 0:
            self.during.append([step, measure(model, *self.dev)[1], by_batch(model, *self.dev)])
            model.train()

    def batches(self, name: str, channel: int, momentum: float) -> list[list[float]]:
        """The mean and the variance [steps, 2] of a channel in each batch, to four digits."""
        running = torch.stack([torch.stack([part[channel] for part in found[name]]) for found in self.statistics])
        running = running.double()
        own = running[:-1] + running.diff(dim=0) / momentum
        return [[float(f"{value:.4g}") for value in pair] for pair in own.tolist()]


def blame(model: nn.Module, running: dict[str, Statistics], new: dict[str, Statistics], digits: dict) -> dict:
    """What the running statistics of each BatchNorm cost, beside the new ones: "norms" in `ABOUT`."""
    found = {}

    def accuracy(name: str, statistics: Statistics) -> float:
        set_statistics(model, new | {name: statistics})
        return measure(model, *digits["test"])[1]

    for name, (mean, variance) in running.items():
        new_mean, new_variance = new[name]
        distances, ratios = (mean - new_mean).abs() / new_variance.sqrt(), variance / new_variance
        channel = distances.argmax().item()
        found[name] = {
            "alone": accuracy(name, (mean, variance)),
            "alone_mean": accuracy(name, (mean, new_variance)),
            "alone_variance": accuracy(name, (new_mean, variance)),
            "channel": channel,
            "deviations": distances[channel].item(),
            "running": [mean[channel].item(), variance[channel].item()],
            "new": [new_mean[channel].item(), new_variance[channel].item()],
            "channels_off_by_one_deviation": (distances > 1).sum().item(),
            "channels": len(mean),
            "variance_ratios": [ratios.min().item(), ratios.max().item()],
        }
    set_statistics(model, new)
    return found


def row_of(seed: int, args, digits: dict) -> dict:
    """The accuracies after one training, and what `blame` finds. They are None if its loss is not finite."""
    row, watch = {"model": args.model, "lr": args.lr, "seed": seed}, Watch(digits["dev"])
    model, result = trained(row, args, digits, watch)
    if not result["finite"]:
        return {"seed": seed, "accuracy": None}
    momenta = {name: norm.momentum for name, norm in named_norms(model).items()}
    running = statistics_of(model)
    watch.statistics.append(running)
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
    images = digits["train"][0][:IMAGES_OF_STATISTICS]
    measure_statistics_again(model, images, drop_path=True)
    found["statistics_with_drop_path"] = measure(model, *digits["test"])[1]
    measure_statistics_again(model, images)
    found |= {"statistics_again": measure(model, *digits["test"])[1], "during": watch.during}
    found["norms"] = norms = blame(model, running, statistics_of(model), digits)
    worst = min(norms, key=lambda name: norms[name]["alone"])
    history = watch.batches(worst, norms[worst]["channel"], momenta[worst])
    return found | {"history": {"norm": worst, "batches": history}}


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
