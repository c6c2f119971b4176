"""What is GKA's own of `GKAForCausalLM`; the rest is in `test_models.py`."""

import torch
from transformers import Qwen3ForCausalLM

from hf_memmix import GKAConfig, GKAForCausalLM
from testing import family_fields, mixers_of


def test_default_initialisation():
    """Fresh parameters follow the paper."""
    torch.manual_seed(0)
    model = GKAForCausalLM(GKAConfig(**family_fields("GKA")))
    mixer = mixers_of(model)[0]
    assert ((mixer.A_log.exp() > 0) & (mixer.A_log.exp() <= 16)).all()
    assert mixer.A_log.dtype == mixer.dt_bias.dtype == torch.float32


def test_presets():
    """One vocabulary and head size for all; the hybrid keeps Qwen3's attention where the paper does."""
    for name in GKAConfig.presets:
        config = GKAConfig.preset(name)
        assert (config.vocab_size, config.head_dim) == (50257, 128)
        assert config.num_attention_heads * config.head_dim == config.hidden_size
        attention = [i for i, kind in enumerate(config.mixer_types) if kind == "attention"]
        assert attention == ([6, 14, 22, 29] if name == "2.8b-hybrid" else [])
    assert issubclass(GKAForCausalLM, Qwen3ForCausalLM)
