"""One product for all layers that read a mixer's input, those of its readout too: no engine is needed."""

import copy

import pytest
import torch

from core.mixer_variants import made
from hf_memmix.mixers import MemoryMixer
from hf_memmix.serving.vllm.joined import JoinedLayers, join_layers
from testing import BESIDE, MIXERS, assert_same

GATED = {"coffee": {"use_gate": True}, "window": {"output_gate": True}}
ONE_LAYER = ("mamba2",)  # reads its input by one layer, so nothing is joined


@torch.no_grad()
@pytest.mark.parametrize("name", sorted(MIXERS))
def test_joined_layers_compute_the_same(name):
    """A `JoinedPart` has no forward, so every output comes from the joined product."""
    layer, x, rotary = made(name, GATED.get(name, {}))
    joined, layers = copy.deepcopy(layer), 0
    for path, part in list(joined.named_modules()):
        if isinstance(part, MemoryMixer):
            join_layers(part, {}, 0, 1, torch.float64, "cpu")
            whole = layer.get_submodule(path)
            for inner in part.joined_layers.sizes if part.joined_layers else ():
                part.get_submodule(inner).load_weights(whole.get_submodule(inner).state_dict().items())
                layers += 1
    products = sum(isinstance(module, JoinedLayers) for module in joined.modules())
    if name in ONE_LAYER:
        assert products == layers == 0
    else:
        assert products == (2 if name == BESIDE else 1) and layers >= 2 * products
    want, _ = layer.scan(layer.project_rows(x, rotary), None)
    tokens = joined.project_rows(x, rotary)
    got, _ = joined.scan(tokens, None)
    assert_same(got, want)
    assert_same(joined.readout(got, x, tokens), layer.readout(want, x))
