"""Write the test images of Fashion-MNIST, of the Debian package dataset-fashion-mnist, as a file for `digits.py`.

    apt-get download dataset-fashion-mnist
    python training/experiments/gka_vision/make_fashion.py dataset-fashion-mnist_*.deb fashion_10k.npz

The 10,000 images are photographs of clothes in ten classes, 28 x 28 pixels in grey (Zalando, under the Expat licence).
The command needs dpkg; nothing is installed.
"""

import subprocess
import tempfile
from pathlib import Path
from typing import Annotated

import numpy
import typer
from torch import Tensor

from hf_memmix.training.experiments.common.idx import read_idx

FOLDER = "usr/share/datasets/fashion-mnist"


def read_folder(folder: Path) -> tuple[Tensor, Tensor]:
    """Images uint8 [N, 28, 28] and labels uint8 [N] of the unpacked package.

    Raises:
        ValueError: the folder has no such files, or they hold other data.
    """
    paths = [folder / FOLDER / f"t10k-{name}-ubyte.gz" for name in ("images-idx3", "labels-idx1")]
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        raise ValueError(f"the package has no {missing[0]} in {FOLDER}; give dataset-fashion-mnist")
    images, labels = map(read_idx, paths)
    if images.shape[1:] != (28, 28) or labels.shape != images.shape[:1] or labels.max() > 9:
        shapes = f"images {tuple(images.shape)} and labels {tuple(labels.shape)}"
        raise ValueError(f"{shapes} are not those of Fashion-MNIST")
    return images, labels


def main(
    package: Annotated[Path, typer.Argument(help="the .deb file of dataset-fashion-mnist")],
    out: Annotated[Path, typer.Argument(help="the .npz file to write")],
) -> None:
    """Write images and labels of the package to one file."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["dpkg", "-x", str(package), folder], check=True)
        images, labels = read_folder(Path(folder))
    numpy.savez_compressed(out, images=images.numpy(), labels=labels.numpy())
    print(f"{len(images)} images, labels {labels.bincount().tolist()}")


if __name__ == "__main__":
    typer.run(main)
