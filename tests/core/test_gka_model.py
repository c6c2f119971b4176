"""What is GKA's own of `GKAForCausalLM`; the rest is in `test_models.py`."""

from transformers import Qwen3ForCausalLM

from hf_memmix import GKAConfig, GKAForCausalLM


def test_presets():
    """One vocabulary and head size for all; the hybrid keeps Qwen3's attention where the paper does."""
    for name in GKAConfig.presets:
        config = GKAConfig.preset(name)
        assert (config.vocab_size, config.head_dim) == (50257, 128)
        assert config.num_attention_heads * config.head_dim == config.hidden_size
        attention = [i for i, kind in enumerate(config.mixer_types) if kind == "attention"]
        assert attention == ([6, 14, 22, 29] if name == "2.8b-hybrid" else [])
    assert issubclass(GKAForCausalLM, Qwen3ForCausalLM)
