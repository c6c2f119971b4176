"""The language models of the Gated KalmaNet paper: a Qwen3 decoder with GKA layers.

    model = GKAForCausalLM(GKAConfig.preset("440m"))

In a hybrid, Qwen3's own attention (RoPE, qk-norm) stays in a few blocks.
"""

from typing import ClassVar

from transformers import Qwen3Config

from .family import FamilyConfig, register_family


def _size(hidden: int, layers: int, heads: int, intermediate: int, **fields) -> dict:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": 128,
        "intermediate_size": intermediate,
        "max_position_embeddings": 2048,
        "vocab_size": 50257,  # GPT-2's tokenizer
        "bos_token_id": 50256,
        "eos_token_id": 50256,
        "tie_word_embeddings": True,
        **fields,
    }


@register_family
class GKAConfig(FamilyConfig, Qwen3Config):
    """A Qwen3 decoder whose layers are GKA, all or all but `attention_layers`; all other fields are Qwen3's.

        GKAConfig.preset("440m")
        GKAConfig(hidden_size=512, num_hidden_layers=8, num_attention_heads=4, attention_layers=[3, 7])

    Presets: "440m", "1b", "2.8b" (Peng et al., Table 3) and "2.8b-hybrid" (Appendix I).
    """

    model_type: ClassVar[str] = "memmix_gka"
    mixer: ClassVar[str] = "gka"
    # intermediate sizes are 8/3 of the hidden size, rounded up to a multiple of 256, and embeddings are tied: that
    # gives the stated numbers of parameters
    presets: ClassVar[dict] = {
        "440m": _size(1024, 28, 8, 2816),
        "1b": _size(1536, 28, 12, 4096),
        "2.8b": _size(2560, 32, 20, 6912, max_position_embeddings=4096),
        "2.8b-hybrid": _size(2560, 30, 20, 6912, max_position_embeddings=4096, attention_layers=[6, 14, 22, 29]),
    }
