"""The language models of the Lattice paper: a Llama decoder with Lattice layers.

model = LatticeForCausalLM(LatticeConfig.preset("110m"))
"""

from typing import ClassVar

from transformers import LlamaConfig

from .family import FamilyConfig, register_family


def _size(hidden: int, layers: int, heads: int, intermediate: int) -> dict:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "intermediate_size": intermediate,
        "max_position_embeddings": 2048,
        "vocab_size": 32000,
        "tie_word_embeddings": True,
    }


@register_family
class LatticeConfig(FamilyConfig, LlamaConfig):
    """A Llama decoder whose layers are Lattice, all or all but `attention_layers`; all other fields are Llama's.

        LatticeConfig.preset("110m")
        LatticeConfig.preset("340m", mixers={"lattice": {"variant": "enc"}})

    Presets: "110m" and "340m", the sizes of Karami and Mirrokni, Tables 2 and 3. The paper does not state the shapes.
    Heads of 64, an MLP of 8/3 of the hidden size and 32000 tied embeddings give the stated numbers of parameters.
    """

    model_type: ClassVar[str] = "memmix_lattice"
    mixer: ClassVar[str] = "lattice"
    presets: ClassVar[dict] = {"110m": _size(768, 12, 12, 2048), "340m": _size(1024, 24, 16, 2816)}
