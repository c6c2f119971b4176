"""Digits as sequences of pixels: the S6 mixer, models of equal size, and a run with its table and plot."""

import argparse
import math

import numpy
import pytest
import torch

from hf_memmix.swap import memory_mixers
from hf_memmix.training.experiments.coffee import pixels, report
from hf_memmix.training.experiments.coffee.s6_mixer import linear_recurrence
from hf_memmix.training.experiments.common import mnist


def test_the_parallel_rounds_are_the_recurrence():
    kept, added = torch.rand(2, 13, 3, dtype=torch.double), torch.randn(2, 13, 3, dtype=torch.double)
    x, expected = torch.zeros(2, 3, dtype=torch.double), []
    for k in range(13):
        x = kept[:, k] * x + added[:, k]
        expected.append(x)
    torch.testing.assert_close(linear_recurrence(kept, added), torch.stack(expected, 1))


def test_s6_is_equation_2_and_may_be_split():
    model = pixels.build("s6", 25, seed=0)
    (mixer,) = memory_mixers(model).values()
    torch.nn.init.normal_(mixer.u_conv1d.weight)
    x = torch.randn(2, 17, 25)
    y, states = mixer.scan(mixer.project(x, None), None)
    u, _ = mixer.u_conv1d(mixer.project(x, None)["u"], None)
    step = torch.nn.functional.softplus(mixer.dt_proj(u))
    A, state = -torch.arange(1.0, 3.0), torch.zeros(2, 25, 2)
    for k in range(17):
        exponent = A * step[:, k, :, None]
        state = exponent.exp() * state + (exponent.exp() - 1) / A * mixer.B_proj(u[:, k])[:, None] * u[:, k, :, None]
        torch.testing.assert_close(y[:, k], (state * mixer.C_proj(u[:, k])[:, None]).sum(-1))
    torch.testing.assert_close(states["x"], state)
    first, middle = mixer.scan(mixer.project(x[:, :9], None), None)
    second, end = mixer.scan(mixer.project(x[:, 9:], None), middle)
    torch.testing.assert_close(torch.cat([first, second], 1), y)
    torch.testing.assert_close(end["x"], states["x"])
    with pytest.raises(ValueError, match="no packed sequences"):
        mixer.scan(mixer.project(x[:1], None), None, cu_seqlens=torch.tensor([0, 17]))


@pytest.mark.parametrize("name", pixels.MODELS)
def test_models_have_equal_parameters(name):
    model = pixels.build(name, 25, seed=0)
    assert abs(model.num_parameters() / pixels.PARAMETERS - 1) < 0.01
    (mixer,) = memory_mixers(model).values()
    floats = sum(math.prod(shape) for key, (shape, _) in mixer.state_shapes(1).items() if not key.startswith("conv"))
    assert floats == 25 * pixels.STATES


def test_a_layer_that_is_too_large_is_refused():
    with pytest.raises(ValueError, match="s6 with 64 features has"):
        pixels.build("s6", 64, seed=0)


def test_the_tokens_of_an_image_are_its_pixels_in_reading_order():
    image = torch.zeros(1, 28, 28, dtype=torch.uint8)
    image[0, 0, 1], image[0, 1, 0], image[0, 27, 27] = 255, 16, 15
    found = pixels.pixels(image)
    assert found.shape == (1, 784) and found.sum() == 16
    assert found[0, 1] == 15 and found[0, 28] == 1 and found[0, 783] == 0


def test_rows_run_and_stand_in_table_and_plot(tmp_path, monkeypatch):
    """Images of 6 x 6 pixels, so that a step is quick."""
    for module in (mnist, pixels):
        monkeypatch.setattr(module, "SIZE", 6)
    monkeypatch.setattr(mnist, "TEST", 8)
    monkeypatch.setattr(mnist, "DEV", 6)
    draws = numpy.random.default_rng(0)
    images = draws.integers(0, 256, (30, 6, 6), dtype=numpy.uint8)
    numpy.savez(tmp_path / "images.npz", images=images, labels=numpy.arange(30) % 10)
    settings = {"steps": 2, "batch_size": 4, "hidden_size": 25, "lrs": [1e-2], "models": list(pixels.MODELS)}
    args = argparse.Namespace(**settings, images=tmp_path / "images.npz", deadline=math.inf)
    rows = [row | pixels.run(row, args) | {"commit": "c"} for row in pixels.rows_to_run([], args)]
    assert len(rows) == len(pixels.MODELS) and all(row["finite"] for row in rows)
    assert len({row["test_loss"] for row in rows}) == len(rows)
    others = pixels.rows_to_run(rows, args)
    assert [row["seed"] for row in others[len(rows) :]] == [seed for seed in pixels.SEEDS for _ in pixels.MODELS]
    results = {"settings": settings, "environment": {"hardware": "h", "commit": "c"}, "rows": rows}
    results["chance_loss"] = math.inf
    table = report.pixels(results)
    for word in ("coffee-filter", "| s6 |", "0.01 (only one)", "(1 seed)", "2 steps of 4 images"):
        assert word in table, word
    pixels.plot_pixels(results, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000
