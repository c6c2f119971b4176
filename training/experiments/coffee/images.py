"""Table 7 of the COFFEE paper, and the images as sequences of pixels of its Appendix I.2.1.

    python -m hf_memmix.training.experiments.coffee.images OUT.json --images mnist_5k.npz

Table 7: the rows, the columns, the rows in reverse order and the columns in reverse order are four sequences of D
features. Each has its own layer. Two small linear layers classify the last outputs. Appendix I.2.1: one layer with
one feature reads the 784 pixels, and a linear layer of all 784 outputs classifies them; the same without the first
layer shows what the linear layer does alone. All seeds of a setting are trained at once. The reported accuracy is that
after the last step, so the test images are not used for any choice.
"""

import itertools
import math
import time
from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F
import typer
from torch import Tensor, nn

from hf_memmix.conversion.records import environment, write_json
from hf_memmix.training.experiments.coffee.baselines import S6Layer
from hf_memmix.training.experiments.coffee.trainer import Run, train
from hf_memmix.training.experiments.common.mnist import CLASSES, read_parts
from hf_memmix.training.experiments.common.mnist import SIZE as WHOLE
from hf_memmix.training.experiments.common.options import Images, check_names
from hf_memmix_kernels import chunk_coffee

DIRECTIONS = 4
SIZE = 25  # of the cropped images of Table 7
MAX_ANGLE = math.radians(5)
MAX_SHIFT = 0.01
# the paper's accuracies on MNIST by model and states, with the sequence of pixels last
PIXELS, LINEAR = "pixels: coffee", "pixels: linear layer alone"
PAPER = {("coffee", 2): 0.966, ("coffee with output filter", 2): 0.970, ("S6", 2): 0.282, ("S6", 16): 0.286}
PAPER |= {(PIXELS, 8): 0.936, (LINEAR, 0): 0.920}
NAMES = [f"{model} n={states}" for model, states in PAPER]
# the rate falls to 0.005 when the training loss is below this value
LOWER_RATE_BELOW = {PIXELS: 0.15, LINEAR: 0.15}


class CoffeeLayers(nn.Module):
    """The COFFEE layers of all directions and S copies of the model, computed as features of one layer."""

    def __init__(self, features: int, states: int, copies: int, output_filter: bool = False):
        super().__init__()
        shape = (copies, features, states)
        self.lam = nn.Parameter(torch.zeros(shape))
        self.w = nn.Parameter(torch.randn(shape))
        self.C = nn.Parameter(torch.randn(shape))
        self.w_filter = nn.Parameter(torch.zeros(shape)) if output_filter else None

    def forward(self, u: Tensor, last: int) -> Tensor:
        w_filter = None if self.w_filter is None else self.w_filter.flatten(0, 1)
        parameters = (p.flatten(0, 1) for p in (self.lam, self.w, self.C))
        return chunk_coffee(u, *parameters, w_filter)[0][:, u.shape[1] - last :]

    @torch.no_grad()
    def project_(self):
        """Clamp lambda to [-2, 0] in place."""
        self.lam.clamp_(-2, 0)


def linear_layers(copies: int, *sizes: int) -> tuple[nn.ParameterList, nn.ParameterList]:
    """Weights [S, n, m] and biases [S, 1, m] of S copies of linear layers of these sizes, as nn.Linear draws them."""
    pairs = [(n, m, n**-0.5) for n, m in itertools.pairwise(sizes)]
    weights = nn.ParameterList(torch.empty(copies, n, m).uniform_(-bound, bound) for n, m, bound in pairs)
    return weights, nn.ParameterList(torch.empty(copies, 1, m).uniform_(-bound, bound) for _, m, bound in pairs)


class FourDirections(nn.Module):
    """S copies of a classifier: images [S, B, D, D] to logits [S, B, 10]. `model` is a name of Table 7 in `PAPER`."""

    def __init__(self, model: str, dim: int, states: int, copies: int):
        super().__init__()
        self.copies, self.dim = copies, dim
        if model == "S6":
            self.layers = S6Layer(dim, states, copies * DIRECTIONS)
        else:
            self.layers = CoffeeLayers(DIRECTIONS * dim, states, copies, output_filter=model != "coffee")
        self.weights, self.biases = linear_layers(copies, DIRECTIONS * dim, dim, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        ways = [images, images.transpose(2, 3), images.flip(2), images.transpose(2, 3).flip(2)]
        # [B, L, S * 4 * D]
        u = torch.stack(ways, 1).permute(2, 3, 0, 1, 4).flatten(2)
        y = self.layers(u, 1).view(-1, self.copies, DIRECTIONS * self.dim).transpose(0, 1)
        hidden = F.gelu(torch.baddbmm(self.biases[0], y, self.weights[0]))
        return torch.baddbmm(self.biases[1], hidden, self.weights[1])

    def project_(self):
        """Bring lambda back into [-2, 0]."""
        if isinstance(self.layers, CoffeeLayers):
            self.layers.project_()


class Pixels(nn.Module):
    """S copies of the classifier of Appendix I.2.1: images [S, B, H, W] to logits [S, B, 10].

    states: those of the COFFEE layer; 0: without this layer.
    """

    def __init__(self, size: int, states: int, copies: int):
        super().__init__()
        self.layer = CoffeeLayers(1, states, copies) if states else None
        self.weights, self.biases = linear_layers(copies, size**2, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        y = images.flatten(2)
        if self.layer is not None:
            y = self.layer(y.permute(1, 2, 0), y.shape[2]).permute(2, 0, 1)
        return torch.baddbmm(self.biases[0], F.gelu(y), self.weights[0])

    def project_(self):
        """Bring lambda back into [-2, 0]."""
        if self.layer is not None:
            self.layer.project_()


def roto_translated(images: Tensor, generator: torch.Generator) -> Tensor:
    """Each image [N, H, W] rotated by up to 5 degrees and shifted by up to 1 %, as in the paper."""

    def uniform(limit, *shape):
        return limit * (2 * torch.rand(len(images), *shape, device=images.device, generator=generator) - 1)

    angle, shift = uniform(MAX_ANGLE), uniform(2 * MAX_SHIFT, 2)
    rows = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()], -1).view(-1, 2, 2)
    grid = F.affine_grid(torch.cat([rows, shift[..., None]], -1), (len(images), 1, *images.shape[1:]), False)
    return F.grid_sample(images[:, None], grid, align_corners=False)[:, 0]


def make_run(
    model: str, states: int, data: tuple, epochs: int, seeds: int = 10, seed: int = 0, batch: int = 512
) -> Run:
    """The training of `seeds` classifiers on `data`: images, labels, test images and test labels."""
    images, labels, test_images, test_labels = data
    torch.manual_seed(seed)
    pixels, size = model in LOWER_RATE_BELOW, images.shape[2]

    def draw(count, generator):
        index = torch.randint(len(images), (seeds, count), device=images.device, generator=generator)
        moved = roto_translated(images[index].flatten(0, 1), generator)
        return (moved.view(seeds, count, *images.shape[1:]),), labels[index]

    def test(_):
        for part, target in zip(test_images.split(2000), test_labels.split(2000), strict=True):
            yield (part.expand(seeds, *part.shape),), target.expand(seeds, -1)

    epoch = -(-len(images) // batch)
    return Run(
        name=f"{model} n={states}",
        model=Pixels(size, states, seeds) if pixels else FourDirections(model, size, states, seeds),
        draw=draw,
        test=test,
        seed=seed,
        batch=batch,
        iterations=epochs * epoch,
        evaluate_every=5 * epoch,
        lower_rate=(LOWER_RATE_BELOW.get(model, 0.45), 0.005),
        info={"model": model, "states": states, "paper_on_mnist": PAPER[model, states]},
    )


def mnist_5k(file: Path, device: torch.device, size: int = SIZE) -> tuple[Tensor, ...]:
    """Training images, labels, test images and test labels: floats in [0, 1] [N, size, size] from the middle."""
    parts = read_parts(file)
    (train, labels), (more, more_labels), (test, test_labels) = (parts[name] for name in ("train", "dev", "test"))
    crop = slice((train.shape[1] - size) // 2, (train.shape[1] - size) // 2 + size)
    images = (found[:, crop, crop].float() / 255 for found in (torch.cat([train, more]), test))
    found = zip(images, (torch.cat([labels, more_labels]), test_labels), strict=True)
    return tuple(tensor.to(device) for part in found for tensor in part)


def main(
    out: Annotated[Path, typer.Argument(help="the JSON file to write")],
    images: Images,
    epochs: int = 600,
    seeds: int = 5,
    seconds: Annotated[float, typer.Option(help="time limit of all training together")] = float("inf"),
    models: Annotated[list[str], typer.Option(help="classifiers to train; repeatable")] = NAMES,
) -> None:
    """Train classifiers on 4,000 images of MNIST."""
    check_names("--models", models, NAMES)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sizes = {model: WHOLE if model in LOWER_RATE_BELOW else SIZE for model, _ in PAPER}
    parts = {size: mnist_5k(images, device, size) for size in set(sizes.values())}
    start = time.perf_counter()
    chosen = [key for key, name in zip(PAPER, NAMES, strict=True) if name in models]
    found = train([make_run(*key, parts[sizes[key[0]]], epochs, seeds) for key in chosen], device, seconds)
    report = {
        "environment": environment(device),
        "data": {"name": "mnist_5k", "train": len(parts[SIZE][0]), "test": len(parts[SIZE][2])},
        "seconds": round(time.perf_counter() - start, 1),
        "runs": found,
    }
    write_json(out, report, indent=None)


if __name__ == "__main__":
    typer.run(main)
