"""GKA language models, to be trained from scratch.

    model = GKAForCausalLM(GKAConfig.preset("440m"))

A block is Qwen3's: x = x + mixer(norm(x)); x = x + mlp(norm(x)), with `mixers.gka.GKAMixer` as the mixer and, in a
hybrid, Qwen3's own attention (RoPE, qk-norm) in a few blocks.
"""

from transformers import AutoModel, AutoModelForCausalLM, Qwen3ForCausalLM, Qwen3Model

from ..modeling_memmix import MemMixForCausalLM, MemMixModel, register_model
from .configuration_gka import GKAConfig


class GKAModel(MemMixModel, Qwen3Model):
    """The decoder below the head: embeddings, blocks, final norm."""

    config_class = GKAConfig


class GKAForCausalLM(MemMixForCausalLM, Qwen3ForCausalLM):
    """The decoder with a language-model head, tied to the embeddings in the presets."""

    config_class = GKAConfig


register_model(AutoModel, GKAConfig, GKAModel, Qwen3Model)
register_model(AutoModelForCausalLM, GKAConfig, GKAForCausalLM, Qwen3ForCausalLM)
