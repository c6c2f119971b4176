"""Attention over a window of the last tokens, as the control of the conversion: it recalls nothing beyond its windows.

    y_t = sum_{t - window < s <= t} softmax(q_t k_s / sqrt(d)) v_s

A student with this "mixer" has the teacher's weights. It remembers the last tokens of the window and nothing else. It
is only made for training and for probes: it reads whole sequences, without padding, packing and cache.
"""

from dataclasses import astuple

import torch
import torch.nn.functional as F
from torch import nn

from hf_memmix.conversion import AttentionWeights, TensorFate, starts
from hf_memmix.conversion.from_attention.projections import take_projections
from hf_memmix.mixers import MixerOptions, mixer_options
from hf_memmix.mixers.base import AttentionShape, MemoryMixer, register_mixer
from hf_memmix.mixers.layers import init_layers

REFUSAL = (
    "the mixer 'window' of this experiment reads whole sequences only; call it without cache, padding and packing"
)


@mixer_options
class WindowOptions(MixerOptions):
    """`window`: number of tokens that a query reads, with its own."""

    window: int = 64


@register_mixer("window")
class WindowMixer(MemoryMixer):
    """The attention of the backbone, limited to the last `window` tokens."""

    options_class = WindowOptions

    def __init__(self, config, layer_idx: int):
        super().__init__(config, layer_idx)
        hidden, self.heads, self.kv_heads, self.head_dim = astuple(AttentionShape.of(config))
        self.q_proj = nn.Linear(hidden, self.heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(hidden, self.kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(hidden, self.kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.head_dim, hidden, bias=False)

    def forward(self, *args, past_key_values=None, layer_past=None, **kwargs):
        if past_key_values is not None or layer_past is not None:
            raise ValueError(REFUSAL)
        return super().forward(*args, **kwargs)

    def project(self, x, rotary):
        cos, sin = (angle.unsqueeze(2) for angle in rotary)
        q, k, v = (layer(x).unflatten(-1, (-1, self.head_dim)) for layer in (self.q_proj, self.k_proj, self.v_proj))
        return {"q": _rotated(q, cos, sin), "k": _rotated(k, cos, sin), "v": v}

    def scan(self, tokens, states, lengths=None, cu_seqlens=None):
        if states or lengths is not None or cu_seqlens is not None:
            raise ValueError(REFUSAL)
        q, k, v = (tokens[name].transpose(1, 2) for name in ("q", "k", "v"))
        k, v = (x.repeat_interleave(self.heads // self.kv_heads, 1) for x in (k, v))
        at = torch.arange(q.shape[2], device=q.device)
        distance = at[:, None] - at
        mask = (distance >= 0) & (distance < self.options.window)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return y.transpose(1, 2), {}

    def readout(self, y, x):
        return self.o_proj(y.flatten(2))

    def state_shapes(self, batch, dtype=torch.float32):
        shape = (batch, self.kv_heads, self.options.window, self.head_dim)
        return {"k": (shape, dtype), "v": (shape, dtype)}

    def init_weights(self):
        init_layers(self)


def _rotated(x, cos, sin):
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat([-second, first], -1) * sin).to(x.dtype)


@starts("window")
@torch.no_grad()
def take_over(mixer: WindowMixer, attention: AttentionWeights) -> list[TensorFate]:
    """Take all weights of the attention unchanged."""
    return take_projections(mixer, attention)
