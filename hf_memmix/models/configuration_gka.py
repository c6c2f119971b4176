"""GKAConfig: the language models of the Gated KalmaNet paper, a Qwen3 decoder with GKA layers."""

from typing import ClassVar

from transformers import AutoConfig, Qwen3Config

from ..configuration_memmix import MemMixConfig
from ..mixers import ATTENTION

# Peng et al., Table 3; intermediate sizes are 8/3 of the hidden size, rounded up to a multiple of 256, and embeddings
# are tied: that gives the stated numbers of parameters
PRESETS = {
    "440m": {"hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 8, "intermediate_size": 2816},
    "1b": {"hidden_size": 1536, "num_hidden_layers": 28, "num_attention_heads": 12, "intermediate_size": 4096},
    "2.8b": {
        "hidden_size": 2560,
        "num_hidden_layers": 32,
        "num_attention_heads": 20,
        "intermediate_size": 6912,
        "max_position_embeddings": 4096,
    },
    # Appendix I: attention with qk-norm in four of the 30 blocks
    "2.8b-hybrid": {
        "hidden_size": 2560,
        "num_hidden_layers": 30,
        "num_attention_heads": 20,
        "intermediate_size": 6912,
        "max_position_embeddings": 4096,
        "attention_layers": [6, 14, 22, 29],
    },
}
_COMMON = {
    "vocab_size": 50257,  # GPT-2's tokenizer
    "bos_token_id": 50256,
    "eos_token_id": 50256,
    "head_dim": 128,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}


class GKAConfig(MemMixConfig, Qwen3Config):
    """A Qwen3 decoder whose layers are GKA, all or all but `attention_layers`.

        GKAConfig.preset("440m")
        GKAConfig(hidden_size=512, num_hidden_layers=8, num_attention_heads=4, attention_layers=[3, 7])

    Args:
        attention_layers: layers that keep softmax attention; ignored where `mixer_types` is given.
        mixer_types, mixers: as in `MemMixConfig`; by default "gka" in every layer.

    All other fields are those of `Qwen3Config`.
    """

    model_type: ClassVar[str] = "memmix_gka"
    _generic: ClassVar[bool] = False
    _backbone_class: ClassVar[type] = Qwen3Config

    attention_layers: list[int] | None = None

    def __post_init__(self, **kwargs):
        layers = range(self.num_hidden_layers)
        if unknown := sorted(set(self.attention_layers or ()) - set(layers)):
            raise ValueError(f"attention_layers {unknown} do not exist: the model has {len(layers)} layers, from 0")
        if self.mixer_types is None:
            self.mixer_types = [ATTENTION if i in (self.attention_layers or ()) else "gka" for i in layers]
        super().__post_init__(**kwargs)

    @classmethod
    def preset(cls, name: str, **overrides) -> "GKAConfig":
        """The configuration of a size of the paper: "440m", "1b", "2.8b" or "2.8b-hybrid"; `overrides` are fields.

        Raises:
            ValueError: there is no such preset.
        """
        if name not in PRESETS:
            raise ValueError(f"unknown preset {name!r}; known: {sorted(PRESETS)}")
        sizes = PRESETS[name]
        return cls(**{**_COMMON, **sizes, "num_key_value_heads": sizes["num_attention_heads"], **overrides})

    @classmethod
    def _register_models(cls):
        from . import gka  # noqa: F401, registers on import


AutoConfig.register(GKAConfig.model_type, GKAConfig)
