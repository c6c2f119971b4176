"""The 5,000 images of MNIST that `gka_vision/make_images.py` writes, in three parts, and their random shifts."""

from pathlib import Path

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor

from hf_memmix.training.experiments.common.harness import device

CLASSES = 10
SIZE = 28
TEST, DEV = 1000, 500  # images, the same for all seeds; the others train


def read_parts(path: Path) -> dict[str, tuple[Tensor, Tensor]]:
    """Images uint8 [N, 28, 28] and labels int64 [N] of "train", "dev" and "test" on the device, drawn by a fixed seed.

    Raises:
        ValueError: the file does not hold images of 28 x 28 pixels with a label each.
    """
    with numpy.load(path) as file:
        images, labels = torch.from_numpy(file["images"]), torch.from_numpy(file["labels"]).long()
    if images.shape[1:] != (SIZE, SIZE) or len(images) != len(labels) or len(images) <= TEST + DEV:
        raise ValueError(f"{path} has images {tuple(images.shape)}; make it by make_images.py")
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    parts = {"test": slice(0, TEST), "dev": slice(TEST, TEST + DEV), "train": slice(TEST + DEV, None)}
    return {name: (images[order][part].to(device()), labels[order][part].to(device())) for name, part in parts.items()}


def shifted(images: Tensor, most: int, background: float, generator: torch.Generator) -> Tensor:
    """Each image [N, H, W] moved by -most to most pixels in both directions; what moves in is background."""
    count, height, width = images.shape
    moves = torch.randint(2 * most + 1, (2, count, 1), generator=generator, device=images.device)
    padded = F.pad(images, [most] * 4, value=background)
    rows = (moves[0] + torch.arange(height, device=images.device))[:, :, None]
    columns = (moves[1] + torch.arange(width, device=images.device))[:, None, :]
    return padded[torch.arange(count, device=images.device)[:, None, None], rows, columns]
