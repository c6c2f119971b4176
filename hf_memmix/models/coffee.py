"""Language models with COFFEE layers: a Llama decoder whose attention is a Mamba-like block of state feedback.

    model = CoffeeForCausalLM(CoffeeConfig.preset("125m"))

The paper has no language model; the sizes are common ones. A COFFEE layer uses no rotary embeddings: its states depend
on the order of the tokens.
"""

from typing import ClassVar

from transformers import LlamaConfig

from .family import FamilyConfig, register_family


def _size(hidden: int, layers: int, intermediate: int, heads: int) -> dict:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,  # of the layers in `attention_layers`
        "num_key_value_heads": heads,
        "intermediate_size": intermediate,
        "max_position_embeddings": 2048,
        "vocab_size": 32000,
        "tie_word_embeddings": True,
    }


@register_family
class CoffeeConfig(FamilyConfig, LlamaConfig):
    """A Llama decoder whose layers are COFFEE, all or all but `attention_layers`; all other fields are Llama's.

        CoffeeConfig.preset("125m")
        CoffeeConfig(hidden_size=512, num_hidden_layers=8, mixers={"coffee": {"states": 8}})

    Presets: "125m", "400m" and "1.5b", with common widths and depths and a vocabulary of 32000.
    """

    model_type: ClassVar[str] = "memmix_coffee"
    mixer: ClassVar[str] = "coffee"
    presets: ClassVar[dict] = {
        "125m": _size(768, 12, 2048, 12),
        "400m": _size(1024, 24, 2816, 16),
        "1.5b": _size(2048, 24, 5632, 32),
    }
