"""The language models of the Gated KalmaNet paper: a Qwen3 decoder with GKA layers.

    model = GKAForCausalLM(GKAConfig.preset("440m"))

In a hybrid, Qwen3's own attention (RoPE, qk-norm) stays in a few blocks.
"""

from typing import ClassVar

from transformers import Qwen3Config

from .family import FamilyConfig, register_family, sizes

# heads of 128 and the vocabulary of GPT-2
OWN = {"head_dim": 128, "vocab_size": 50257, "bos_token_id": 50256, "eos_token_id": 50256}
LONG = OWN | {"max_position_embeddings": 4096}


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
        "440m": sizes(1024, 28, 8, 2816, **OWN),
        "1b": sizes(1536, 28, 12, 4096, **OWN),
        "2.8b": sizes(2560, 32, 20, 6912, **LONG),
        "2.8b-hybrid": sizes(2560, 30, 20, 6912, attention_layers=[6, 14, 22, 29], **LONG),
    }
