"""Shapes of Llamas for which costs are measured or computed."""

import functools
from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

LLAMA = {"num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072}


@dataclass(frozen=True)
class Shape:
    """A Llama: its name in the tables and the fields of its configuration."""

    name: str
    fields: dict

    def model(self):
        """The model without weights, in bf16."""
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(LlamaConfig(**self.fields), dtype=torch.bfloat16)

    @functools.cached_property
    def parameters(self) -> int:
        return self.model().num_parameters()

    @property
    def width(self) -> int:
        """Layers times hidden size."""
        return self.fields["num_hidden_layers"] * self.fields["hidden_size"]


def _shape(name: str, hidden: int, layers: int, heads: int, head: int, inner: int, tied: bool, **fields) -> Shape:
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads, "head_dim": head}
    return Shape(name, LLAMA | sizes | {"intermediate_size": inner, "tie_word_embeddings": tied} | fields)


# the model of kernels/benchmarks/benchmark_model.py, and that of experiments/several_gpus
TIMED = _shape("1.0B", 2048, 16, 32, 64, 8192, True, vocab_size=32000)
DISTILLED = _shape("1.2B", 2048, 16, 32, 64, 8192, True)
# the shape of SmolLM2-135M: so small a model leaves a GPU partly idle
SMALL = _shape(
    "135M", 576, 30, 9, 64, 1536, True, num_key_value_heads=3, vocab_size=49152, max_position_embeddings=8192
)
# shapes of the Llama 3 family
SHAPES = (DISTILLED, _shape("3.2B", 3072, 28, 24, 128, 8192, True), _shape("8.0B", 4096, 32, 32, 128, 14336, False))
