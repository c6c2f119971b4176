"""Classifiers of small grey images: the data, one training, and its accuracy. Shared by the scripts of this folder."""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_memmix.training.experiments.common.fit import autocast, fit
from hf_memmix.training.experiments.common.harness import device
from hf_memmix.training.experiments.common.mnist import CLASSES, SIZE, read_parts, shifted
from hf_memmix.training.experiments.gka_vision.models import SMALL, build

PADDING, ENLARGED = 2, 4
PART = 250  # images of a forward without gradients


def load_digits(path: Path) -> dict[str, tuple[Tensor, Tensor]]:
    """Images in [-1, 1] [N, 1, 32, 32] and labels [N] of "train", "dev" and "test"; errors as in `read_parts`."""
    return {
        name: (F.pad(images[:, None].float() / 127.5 - 1, [PADDING] * 4, value=-1.0), labels)
        for name, (images, labels) in read_parts(path).items()
    }


def enlarged(images: Tensor) -> Tensor:
    return F.interpolate(images, scale_factor=ENLARGED, mode="bilinear")


@torch.no_grad()
def measure(model: nn.Module, images: Tensor, labels: Tensor) -> tuple[float, float]:
    """Loss and accuracy, in bf16 on a GPU."""
    model.eval()
    with autocast():
        logits = torch.cat([model(enlarged(part)).logits for part in images.split(PART)]).float()
    return F.cross_entropy(logits, labels).item(), (logits.argmax(-1) == labels).float().mean().item()


@torch.no_grad()
def measure_statistics_again(model: nn.Module, images: Tensor) -> bool:
    """Replace the running statistics of every BatchNorm by the means over `images`; False if there is no BatchNorm.

    Running statistics are those of the last few steps. After a training at a high rate they may not fit the weights.
    """
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    model.eval()
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # the mean over all batches
        norm.train()
    if norms:
        with autocast():
            for part in images.split(PART):
                model(enlarged(part))
    return bool(norms)


def trained(row: dict, args, digits: dict[str, tuple[Tensor, Tensor]]) -> tuple[nn.Module, dict]:
    """Train the model of a row on the part "train" of `digits`; returns it and the result of `fit` with its size.

    row: `{"model", "lr", "seed"}`. args: `steps`, `batch_size` and what `fit` reads.
    """
    common = {"image_size": (SIZE + 2 * PADDING) * ENLARGED, "num_channels": 1, "num_labels": CLASSES}
    model = build(row["model"], SMALL, row["seed"], **common).to(device())
    images, labels = digits["train"]
    stream = torch.Generator(device()).manual_seed(row["seed"])

    def batch_of(step):
        index = torch.randint(len(images), (args.batch_size,), generator=stream, device=images.device)
        return enlarged(shifted(images[index, 0], PADDING, -1.0, stream)[:, None]), labels[index]

    def loss_of(x, y):
        return F.cross_entropy(model(x).logits.float(), y)

    result = fit(model, loss_of, args.steps, row["lr"], args, batch_of)
    return model, result | {"parameters": model.num_parameters()}
