"""Every mixer with every value of its options: padding, splits and single steps, at the level of the mixer."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from core.mixer_variants import VARIANTS, every_variant, made
from hf_memmix.mixers import MixerOptions
from testing import assert_same, mixers_of, tiny_config


def assert_same_states(actual, expected, row, what):
    assert actual.keys() == expected.keys()
    for name, state in expected.items():
        assert_same(actual[name][row : row + 1].double(), state.double(), f"{what}, state {name}")


@torch.no_grad()
@every_variant
def test_pads_write_nothing(mixer, options):
    layer, x, rotary = made(mixer, options)
    tokens, lengths = layer.project(x, rotary), torch.tensor([9, 13, 4])
    y, states = layer.scan(tokens, None, lengths=lengths)
    for row, length in enumerate(lengths.tolist()):
        alone, expected = layer.scan({k: v[row : row + 1, :length] for k, v in tokens.items()}, None)
        assert_same(y[row : row + 1, :length], alone, f"row {row}")
        assert_same_states(states, expected, row, f"row {row}")


@torch.no_grad()
@every_variant
def test_splits_and_steps(mixer, options):
    layer, x, rotary = made(mixer, options)
    tokens = layer.project(x, rotary)
    y, states = layer.scan(tokens, None)
    first, between = layer.scan({k: v[:, :7] for k, v in tokens.items()}, None)
    between = {name: state.clone() for name, state in between.items()}
    second, last = layer.scan({k: v[:, 7:] for k, v in tokens.items()}, between)
    assert_same(torch.cat([first, second], 1), y, "in two parts")
    steps = [layer.step({k: v[:, t : t + 1] for k, v in tokens.items()}, between) for t in range(7, 13)]
    assert_same(torch.cat([first, *steps], 1), y, "in steps")
    for row in range(3):
        expected = {name: state[row : row + 1] for name, state in states.items()}
        if options.get("refresh_every") == 1:  # counts steps where nothing reads it: there are no chunks
            between["position"], last["position"] = states["position"], states["position"]
        assert_same_states(last, expected, row, "in two parts")
        assert_same_states(between, expected, row, "in steps")


@torch.no_grad()
@pytest.mark.parametrize(("mixer", "options"), [row for row in VARIANTS if row[0] == "lattice"], ids=str)
def test_norm_of_lattices_start_does_not_matter(mixer, options):
    """S_0 is normalised when it is used, also if the writes do not normalise the slots."""
    layer, x, rotary = made(mixer, options)
    layer = getattr(layer, "memory", layer)  # without a window beside it
    tokens = layer.project(x, rotary)
    y, states = layer.scan(tokens, None)
    layer.S0.mul_(torch.linspace(0.1, 9, layer.S0.shape[-1], dtype=torch.float64))
    scaled, again = layer.scan(tokens, None)
    assert_same(scaled, y)
    assert_same(again["S"], states["S"])


@torch.no_grad()
@pytest.mark.parametrize("use_beta", (True, False))
def test_pads_of_gka_have_no_write_strength(use_beta):
    """beta is set to zero at pads; this does not depend on the zeros that the convolution leaves there."""
    layer, x, rotary = made("gka", {"use_beta": use_beta})
    *_, log_decay, beta, _ = layer.memory_inputs(layer.project(x, rotary), None, torch.tensor([9, 13, 4]), None)
    for row, length in enumerate((9, 13, 4)):
        assert (beta[row, :length] > 0).all()
        assert not beta[row, length:].any() and not log_decay[row, length:].any()


@every_variant
def test_a_layer_learns_from_its_shortest_training_sequence(mixer, options):
    """With this length an output before the last, which has no label, depends on the input; with less it does not."""
    layer, x, rotary = made(mixer, options)
    least = layer.minimum_training_length(layer.options)
    for length in {least, max(least - 1, 2)}:
        inputs = x[:, :length].clone().requires_grad_()
        tokens = layer.project(inputs, tuple(angle[:, :length] for angle in rotary))
        out = layer.readout(layer.scan(tokens, None)[0], inputs)
        (gradient,) = torch.autograd.grad((out * torch.randn_like(out))[:, :-1].sum(), inputs)
        assert (gradient.abs().max() > 0) == (length >= least), length


def test_options_are_checked_once(monkeypatch, tmp_path):
    """This holds for building, saving and loading a model. Each layer has its own copy."""
    made, check = [], MixerOptions._check.__func__

    def counted(cls, options):
        made.append(options)
        return check(cls, options)

    monkeypatch.setattr(MixerOptions, "_check", classmethod(counted))
    config = tiny_config("llama", "all", options={"chunk_size": 11})
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    AutoModelForCausalLM.from_pretrained(tmp_path)
    layers = list(mixers_of(model).values())
    assert len(layers) > 1
    assert len(made) == 1
    layers[0].options.chunk_size = 13
    assert {layer.options.chunk_size for layer in layers[1:]} == {11}
    config.validate_mixers()
    assert config.mixers["gka"]["chunk_size"] == 11
