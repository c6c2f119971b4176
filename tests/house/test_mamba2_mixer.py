"""Mamba-2 beside transformers' own: the same outputs, gradients and states from the same files."""

import pytest
import torch
from transformers import Mamba2Config
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer as NativeMixer

from hf_memmix.mixers import MIXERS
from hf_memmix.mixers.mamba2 import LARGEST_READOUT, GatedRMSNorm, Mamba2Options
from testing import assert_same, tiny_config

SIZES = {"state_size": 6, "head_dim": 8, "expand": 2, "n_groups": 2}


def pair(hidden=32, limit=None, bias=False, seed=0):
    """The native mixer, its parameters all random, and ours with them by name."""
    torch.manual_seed(seed)
    native = NativeMixer(
        Mamba2Config(
            **SIZES, num_heads=8, hidden_size=hidden, use_bias=bias, chunk_size=4, num_hidden_layers=1,
            time_step_limit=limit or (0.0, float("inf")), layer_norm_epsilon=1e-5,
        ),
        0,
    )  # fmt: skip
    with torch.no_grad():
        for name, parameter in native.named_parameters():
            if name not in ("A_log", "dt_bias"):
                parameter.copy_(torch.randn_like(parameter) * 0.5)
    options = {**SIZES, "use_bias": bias, "time_step_limit": limit}
    ours = MIXERS["mamba2"](tiny_config("llama", (0,), "mamba2", options, hidden_size=hidden), 0)
    ours.load_state_dict(native.state_dict())  # strict: names and shapes are the native ones
    return native, ours


@pytest.mark.parametrize(
    ("limit", "bias"), [(None, False), ([0.01, 0.05], True)], ids=["released", "limits and biases"]
)
def test_parity_with_transformers(limit, bias):
    native, ours = pair(limit=limit, bias=bias)
    x = torch.randn(2, 21, 32)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    expected, actual = native(inputs[0]), ours(inputs[1])[0]
    assert_same(actual, expected, tolerance=2e-5)
    for y in (expected, actual):
        y.backward(torch.ones_like(y).cumsum(-1))
    assert_same(inputs[1].grad, inputs[0].grad, "gradient of the input", tolerance=1e-4)
    gradients = {name: p.grad for name, p in native.named_parameters()}
    for name, parameter in ours.named_parameters():
        assert_same(parameter.grad, gradients[name], name, tolerance=1e-4)


@torch.no_grad()
def test_steps_equal_transformers():
    """Token by token in place, from zero states."""
    native, ours = pair()
    x = torch.randn(3, 9, 32)
    states = ours.allocate_states(3, "cpu", torch.float32)
    parts = []
    for token in x.split(1, 1):
        parts.append(ours.readout(ours.step(ours.project(token, None), states), token))
    assert_same(torch.cat(parts, 1), native(x), tolerance=2e-5)


def test_start_is_transformers():
    """A, D exactly; dt in its range; taps as large."""
    torch.manual_seed(0)
    native, ours = pair()
    ours.init_weights()
    native.init_mamba2_weights()
    for name in ("A_log", "D"):
        torch.testing.assert_close(getattr(ours, name), getattr(native, name))
    dt = torch.nn.functional.softplus(ours.dt_bias)
    assert ((dt > 9e-4) & (dt < 0.11)).all() and ours.conv1d.weight.abs().max() <= 0.5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"state_size": 512}, "state_size=512.*256"),
        ({"head_dim": 0}, "head_dim=0"),
        ({"expand": -1.0}, "expand=-1.0"),
        ({"n_groups": 0}, "n_groups=0"),
        ({"chunk_size": 48}, r"chunk_size=48.*\(16, 32, 64, 128\)"),
        ({"conv_size": 1}, "conv_size=1"),
        ({"time_step_limit": [0.1, 0.01]}, "time_step_limit"),
        ({"time_step_limit": 3}, "time_step_limit"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        Mamba2Options(**options)


@pytest.mark.parametrize("sizes", [{"head_dim": 48}, {"n_groups": 3}, {"expand": 0.01}])
def test_heads_must_divide_the_features(sizes):
    with pytest.raises(ValueError, match="layer 0: expand=.* features"):
        MIXERS["mamba2"](tiny_config("llama", (0,), "mamba2", sizes), 0)


@pytest.mark.parametrize("constant", [True, False], ids=["constant", "random"])
@pytest.mark.parametrize("scale", [0.0, 1.0, 1e3, 1e15, 1e30])
def test_no_nan(scale, constant):
    """The layer is of fifth order in its input, which a norm precedes in every model."""
    _, ours = pair()
    x = scale * (torch.ones(1, 40, 32) if constant else torch.randn(1, 40, 32))
    x.requires_grad_()
    y = ours(x)[0]
    y.sum().backward()
    assert y.isfinite().all() and x.grad.isfinite().all()
    assert all(p.grad.isfinite().all() for p in ours.parameters())
    with torch.no_grad():
        states = ours.allocate_states(1, "cpu", torch.float32)
        steps = [ours.readout(ours.step(ours.project(x[:, t : t + 1], None), states), x) for t in range(40)]
    assert all(t.isfinite().all() for t in [*steps, *states.values()])


@torch.no_grad()
@pytest.mark.parametrize("size", (1e20, 1e30))
def test_readout_past_the_clamp(size):
    """Its square would be infinite in float32, and the normed readout zero: it is that of the largest readout."""
    norm = GatedRMSNorm(8, 2, 1e-5)
    y = torch.linspace(-1, 1, 8).sign().expand(1, 3, 8)
    z = torch.linspace(0.5, 2, 8).expand(1, 3, 8)
    assert_same(norm(size * y, z), norm(LARGEST_READOUT * y, z), tolerance=1e-6)
    assert norm(size * y, z).abs().min() > 0.1
