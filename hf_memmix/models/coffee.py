"""Language models with COFFEE layers: a Llama decoder whose attention is a Mamba-like block of state feedback.

    model = CoffeeForCausalLM(CoffeeConfig.preset("125m"))

The paper has no language model; the sizes are common ones. A COFFEE layer uses no rotary embeddings: its states depend
on the order of the tokens.
"""

from typing import ClassVar

from transformers import LlamaConfig

from .family import FamilyConfig, register_family, sizes


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
        "125m": sizes(768, 12, 12, 2048),
        "400m": sizes(1024, 24, 16, 2816),
        "1.5b": sizes(2048, 24, 32, 5632),
    }
