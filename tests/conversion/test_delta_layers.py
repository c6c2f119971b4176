"""Layers of transformers' Qwen3-Next and Kimi Linear, and mixers with their weights, compute the same."""

import importlib.util

import pytest
import torch
from transformers import Qwen3NextConfig

from hf_memmix.conversion import load_delta_layer
from hf_memmix.mixers import MIXERS as MIXER_CLASSES
from testing import assert_same, tiny_config

HIDDEN, HEADS, D, TOKENS = 32, 4, 8, 70
EPS = 1e-6  # of the norms
OTHERS = {"num_hidden_layers": 2, "hidden_size": HIDDEN, "rms_norm_eps": EPS}


def qwen3_next(key_heads: int):
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

    sizes = {"linear_num_key_heads": key_heads, "linear_num_value_heads": HEADS}
    sizes |= {
        "linear_key_head_dim": D,
        "linear_value_head_dim": D,
        "num_hidden_layers": 2,
        "hidden_size": HIDDEN,
        "rms_norm_eps": EPS,
    }
    return Qwen3NextGatedDeltaNet(Qwen3NextConfig(**sizes), 0)


def kimi():
    from transformers import KimiLinearConfig
    from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention

    sizes = {
        "linear_num_heads": HEADS,
        "linear_head_dim": D,
        "num_hidden_layers": 2,
        "hidden_size": HIDDEN,
        "rms_norm_eps": EPS,
    }
    return KimiLinearDeltaAttention(KimiLinearConfig(**sizes), 0)


ROWS = {
    "one head of q and k per value head": ("gated_delta", lambda: qwen3_next(HEADS)),
    "shared heads of q and k": ("gated_delta", lambda: qwen3_next(HEADS // 2)),
}
if importlib.util.find_spec("transformers.models.kimi_linear"):  # newer than our oldest release of transformers
    ROWS["Kimi Linear"] = ("kda", kimi)


def drawn(layer):
    """Random weights of unit gain: heads of q and k then have norms at which both ways to normalise agree."""
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if parameter.dim() > 1 and "A_log" not in name:
                parameter.copy_(torch.randn_like(parameter) * (3 if "conv" in name else parameter.shape[-1] ** -0.5))
            else:
                parameter.copy_(torch.randn_like(parameter) * 0.3)
    return layer.double().eval()


def mixer_for(name: str, heads: int = HEADS):
    config = tiny_config("llama", (0,), name, {"negative_eigenvalues": False, "norm_eps": EPS})
    config.num_key_value_heads = heads
    return MIXER_CLASSES[name](config, 0).double().eval()


@torch.no_grad()
@pytest.mark.parametrize("row", ROWS)
def test_a_mixer_with_the_weights_computes_the_same(row):
    name, make = ROWS[row]
    layer, mixer = drawn(make()), mixer_for(name)
    load_delta_layer(mixer, layer)
    x = torch.randn(2, TOKENS, HIDDEN, dtype=torch.float64)
    # the layer computes its memory in float32, and adds 1e-6 to squares of norms where we add it to the norm
    assert_same(mixer(x)[0], layer(x), tolerance=1e-4)


def test_layers_that_do_not_fit_are_refused():
    layer = qwen3_next(HEADS)
    with pytest.raises(ValueError, match="Qwen3NextGatedDeltaNet.*kda"):
        load_delta_layer(mixer_for("kda"), layer)
    with pytest.raises(ValueError, match=r"k_conv1d.*\[16, 1, 4\].*\[32, 1, 4\]"):
        load_delta_layer(mixer_for("gated_delta", heads=2), layer)
