"""Every mixer with every value of its options, for tests of single mixers."""

import pytest
import torch

from hf_memmix import MIXERS as MIXER_CLASSES
from hf_memmix.mixers import BesideWindow, new_layer
from testing import MIXERS, tiny_config

# other values of options that are not flags; the value of a flag is inverted. A mixer without a row runs with the
# values of tests/testing.py and its flags
VALUES = {
    "gka": {
        "solver_phases": [[5, 4]],
        "sketch_dim": [1, 4, 8],  # 8 is the head size
        "conv_size": [2],
        "conv_activation": [None],
        "qk_norm": ["head", "full"],
    },
    "lattice": {
        "variant": ["enc", "sim", "ttt", "delta"],
        "slots": [1, None],
        "step_size": ["softplus", "constant"],
        "l1": [0.01],
        "conv_activation": [None],
        "use_v_conv": [True],
    },
    "coffee": {"conv_activation": [None]},
    "ska": {"power": [0], "chunk_size": [1], "refresh_every": [1]},
    "mamba2": {"n_groups": [1], "time_step_limit": [[0.01, 0.05]]},
    "gated_delta": {"conv_size": [2], "conv_activation": [None], "qk_norm": ["head", "full"]},
    "kda": {"conv_activation": [None], "qk_norm": ["head"]},
    "window": {"window": [2, 64], "sinks": [0, 3], "scale": [0.2], "softcap": [2.0], "qk_norm": ["head", "full"]},
}
# options of every memory
OF_MEMORIES = {"local_window": [4]}
# options that a flag requires
BESIDE = {"use_rope": {"slots": None}, "qk_norm": {"share_qk": False}}


def variants():
    for mixer, row in MIXERS.items():
        options_class = MIXER_CLASSES[mixer].options_class
        defaults = options_class.from_dict(row).to_dict()
        values = VALUES.get(mixer, {}) | (OF_MEMORIES if mixer != "window" else {})
        yield mixer, {}
        for name, default in defaults.items():
            for value in [not default] if isinstance(default, bool) else values.get(name, []):
                beside = {k: v for k, v in BESIDE.get(name, {}).items() if k in defaults}
                yield mixer, {name: value, **beside}


VARIANTS = list(variants())
every_variant = pytest.mark.parametrize(("mixer", "options"), VARIANTS, ids=str)
# every variant in `make test-all`; in `make test`, every mixer with its defaults and every third of the others
every_third_variant = pytest.mark.parametrize(
    ("mixer", "options"),
    [
        pytest.param(*row, marks=() if i % 3 == 0 or not row[1] else pytest.mark.product)
        for i, row in enumerate(VARIANTS)
    ],
    ids=str,
)


@torch.no_grad()
def made(mixer, options):
    """A random mixer in float64, its input [3, 13, 32] and the angles of rotary embeddings."""
    generator = torch.Generator().manual_seed(0)
    layer = new_layer(mixer, tiny_config("llama", (0,), mixer, options), 0)
    torch.manual_seed(0)
    layer.init_weights()
    for parameter in layer.parameters():
        if (
            parameter.ndim == 2 and parameter.shape[-1] > 3
        ):  # projections: with a std of 0.02 they would hardly change a state
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5)
    if isinstance(layer, BesideWindow):
        layer.m.fill_(4)  # so that the memory is heard beside the window
    angles = torch.randn(3, 13, 4, generator=generator, dtype=torch.float64).repeat(1, 1, 2)
    x = torch.randn(3, 13, 32, generator=generator, dtype=torch.float64)
    return layer.double(), x, (angles.cos(), angles.sin())
