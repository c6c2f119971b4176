"""Gated linear attention with twice the heads of the attention, so that its memory is as large as that of GKA.

The memory of GKA has two matrices per head, that of "gla" one. "gla-wide" has two heads for each head of the
attention: both start with the weights of this head, and each gives half of its output. So it also has more weights
than "gla": those of the projections, the gate and the convolutions of the second heads.
"""

import copy
from dataclasses import replace

import torch

from hf_memmix.conversion import AttentionWeights, TensorFate, starts
from hf_memmix.conversion.from_attention import gka as gka_start
from hf_memmix.conversion.from_attention.registry import start_of
from hf_memmix.mixers import mixer_options
from hf_memmix.mixers.base import AttentionShape, register_mixer
from hf_memmix.training.experiments.common.baselines import GLAMixer, GLAOptions

TIMES = 2  # heads for each head of the attention


@mixer_options
class WideGLAOptions(GLAOptions):
    """`GLAOptions`."""


@register_mixer("gla-wide")
class WideGLAMixer(GLAMixer):
    """`GLAMixer` with `TIMES` as many query heads and key/value heads as the attention, of the same size."""

    options_class = WideGLAOptions

    def __init__(self, config, layer_idx: int):
        shape, config = AttentionShape.of(config), copy.copy(config)
        config.num_attention_heads, config.num_key_value_heads = TIMES * shape.heads, TIMES * shape.kv_heads
        config.head_dim = shape.head_dim
        super().__init__(config, layer_idx)


@starts("gla-wide", options=gka_start.options_for)
@torch.no_grad()
def take_over(mixer: WideGLAMixer, attention: AttentionWeights) -> list[TensorFate]:
    """Start every copy of a head as "gla" starts the head; the output projection is divided by their number."""
    wide = {"num_heads": TIMES * attention.num_heads, "num_kv_heads": TIMES * attention.num_kv_heads}
    for role in "qkv":
        for kind in ("weight", "bias"):
            if (tensor := getattr(attention, f"{role}_{kind}")) is not None:
                wide[f"{role}_{kind}"] = tensor.repeat(TIMES, *[1] * (tensor.ndim - 1))
    wide["o_weight"] = attention.o_weight.repeat(1, TIMES) / TIMES
    fates = start_of("gla").take_over(mixer, replace(attention, **wide))
    reason = f"repeated for {TIMES} heads per head"
    return [replace(fate, fate="transformed", reason=reason) if fate.field in wide else fate for fate in fates]
