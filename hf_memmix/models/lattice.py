"""The language models of the Lattice paper: a Llama decoder with Lattice layers.

model = LatticeForCausalLM(LatticeConfig.preset("110m"))
"""

from typing import ClassVar

from transformers import LlamaConfig

from .family import FamilyConfig, register_family, sizes


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
    presets: ClassVar[dict] = {"110m": sizes(768, 12, 12, 2048), "340m": sizes(1024, 24, 16, 2816)}
