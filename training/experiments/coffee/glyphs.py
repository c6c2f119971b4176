"""Images of digits for the COFFEE paper's classifier: jittered strokes, scikit-learn's digits, or MNIST.

The strokes replace MNIST where its files are missing. They are another task, so their figures cannot be compared with
those of MNIST. Each function returns (training images, labels, test images, labels): floats in [0, 1] [N, H, W].
"""

import math
from pathlib import Path

import torch
from torch import Tensor

from hf_memmix.training.experiments.common.idx import read_idx
from hf_memmix.training.experiments.common.mnist import read_parts

SIZE = 25
# pen strokes of the ten digits in the unit square, x to the right and y down; a break starts a stroke of its own
_STROKES = (
    (((0.5, 0.1), (0.28, 0.25), (0.25, 0.6), (0.4, 0.88), (0.62, 0.88), (0.76, 0.6), (0.72, 0.25), (0.5, 0.1)),),
    (((0.33, 0.28), (0.52, 0.1), (0.52, 0.9)),),
    (((0.25, 0.3), (0.38, 0.12), (0.62, 0.12), (0.74, 0.3), (0.6, 0.52), (0.25, 0.9), (0.78, 0.9)),),
    (((0.25, 0.15), (0.6, 0.1), (0.72, 0.28), (0.45, 0.47), (0.75, 0.66), (0.62, 0.9), (0.25, 0.85)),),
    (((0.55, 0.1), (0.2, 0.62), (0.82, 0.62)), ((0.62, 0.35), (0.62, 0.92))),
    (((0.72, 0.1), (0.32, 0.1), (0.28, 0.45), (0.6, 0.42), (0.75, 0.65), (0.6, 0.9), (0.25, 0.85)),),
    (((0.65, 0.1), (0.36, 0.4), (0.27, 0.7), (0.45, 0.9), (0.7, 0.78), (0.62, 0.55), (0.3, 0.64)),),
    (((0.22, 0.12), (0.78, 0.1), (0.42, 0.9)), ((0.38, 0.5), (0.7, 0.5))),
    (
        (
            (0.5, 0.48),
            (0.3, 0.3),
            (0.5, 0.1),
            (0.7, 0.3),
            (0.5, 0.48),
            (0.28, 0.7),
            (0.5, 0.9),
            (0.72, 0.7),
            (0.5, 0.48),
        ),
    ),
    (((0.7, 0.4), (0.5, 0.5), (0.3, 0.35), (0.42, 0.12), (0.68, 0.15), (0.7, 0.4), (0.6, 0.9)),),
)


def glyphs(train: int = 50_000, test: int = 10_000, seed: int = 0, device: torch.device | str = "cpu"):
    """Digits of pen strokes, 25 x 25, drawn at random: points, slant, size, place, thickness and ink vary."""
    generator = torch.Generator(device).manual_seed(seed)
    parts = [_render(min(2000, train + test - i), generator) for i in range(0, train + test, 2000)]
    images, labels = (torch.cat(part) for part in zip(*parts, strict=True))
    return images[:train], labels[:train], images[train:], labels[train:]


def digits(seed: int = 0, test: int = 500):
    """scikit-learn's 1797 digits of 8 x 8 pixels, split at random.

    Raises:
        ImportError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError("the digits data set comes with scikit-learn: pip install scikit-learn") from error
    found = load_digits()
    order = torch.randperm(len(found.target), generator=torch.Generator().manual_seed(seed))
    images, labels = torch.tensor(found.images, dtype=torch.float32)[order] / 16, torch.tensor(found.target)[order]
    return images[:-test], labels[:-test].long(), images[-test:], labels[-test:].long()


def mnist_5k(file: Path):
    """The 5,000 images of MNIST of `common/mnist.py`, cropped to 25 x 25 as in the paper; 4,000 train, 1,000 test."""
    parts = read_parts(file)
    (train, labels), (more, more_labels), (test, test_labels) = (parts[name] for name in ("train", "dev", "test"))
    return _cropped(torch.cat([train, more])), torch.cat([labels, more_labels]), _cropped(test), test_labels


def mnist(folder: str | Path):
    """MNIST from its four idx files, plain or gzipped, cropped to 25 x 25 as in the paper.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file does not hold the data that its name promises.
    """
    folder, found = Path(folder), []
    for part in ("train", "t10k"):
        images = read_idx(_find(folder, f"{part}-images-idx3-ubyte"))
        labels = read_idx(_find(folder, f"{part}-labels-idx1-ubyte"))
        if images.dim() != 3 or labels.dim() != 1 or len(images) != len(labels):
            raise ValueError(f"{folder}: {part} has images {tuple(images.shape)} and labels {tuple(labels.shape)}")
        found += [_cropped(images), labels.long()]
    return tuple(found)


def _cropped(images: Tensor) -> Tensor:
    """Bytes [N, 28, 28] to floats in [0, 1] [N, 25, 25]."""
    start = (images.shape[1] - SIZE) // 2
    crop = slice(start, start + SIZE)
    return images[:, crop, crop].float() / 255


def _find(folder: Path, name: str) -> Path:
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path
    raise FileNotFoundError(f"{folder} has no {name} and no {name}.gz; put MNIST's four idx files there")


def _segments() -> tuple[Tensor, Tensor]:
    """Ends of the strokes' segments [10, K, 2, 2] and which of them there are [10, K]."""
    found = [[(a, b) for stroke in digit for a, b in zip(stroke, stroke[1:], strict=False)] for digit in _STROKES]
    most = max(len(segments) for segments in found)
    there = torch.tensor([[i < len(segments) for i in range(most)] for segments in found])
    return torch.tensor([segments + [segments[-1]] * (most - len(segments)) for segments in found]), there


def _render(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    device = generator.device

    def uniform(low, high, *shape):
        return low + (high - low) * torch.rand(count, *shape, device=device, generator=generator)

    table, there = (t.to(device) for t in _segments())
    labels = torch.randint(10, (count,), device=device, generator=generator)
    ends = table[labels] - 0.5  # [N, K, 2, 2]
    # a smooth bend of the plane, so that strokes that meet still do
    phase, strength = uniform(0, 2 * math.pi, 2), uniform(-0.06, 0.06, 2)
    bend = torch.sin(5 * ends.flip(-1) + phase[:, None, None]) * strength[:, None, None]
    angle, slant = uniform(-0.25, 0.25), uniform(-0.25, 0.25)
    width, height = uniform(0.6, 1.0), uniform(0.75, 1.0)
    row_x = torch.stack([width * angle.cos(), width * (slant - angle.sin())], -1)
    row_y = torch.stack([height * angle.sin(), height * angle.cos()], -1)
    ends = (ends + bend) @ torch.stack([row_x, row_y], -1)[:, None] + uniform(-0.1, 0.1, 2)[:, None, None]

    axis = (torch.arange(SIZE, device=device) + 0.5) / SIZE - 0.5
    pixels = torch.stack(torch.meshgrid(axis, axis, indexing="xy"), -1).view(-1, 2)
    a, along = ends[:, :, 0], ends[:, :, 1] - ends[:, :, 0]
    offset = pixels - a[:, :, None]  # [N, K, P, 2]
    share = (offset * along[:, :, None]).sum(-1) / along.square().sum(-1).clamp_min(1e-9)[..., None]
    distance = torch.linalg.vector_norm(offset - share.clamp(0, 1)[..., None] * along[:, :, None], dim=-1)
    distance = distance.masked_fill(~there[labels][..., None], float("inf")).amin(1)
    ink = uniform(0.7, 1.0, 1) * torch.sigmoid((uniform(0.03, 0.065, 1) - distance) / 0.012)
    noise = 0.08 * torch.randn(ink.shape, device=device, generator=generator)
    return (ink + noise).clamp(0, 1).view(count, SIZE, SIZE), labels
