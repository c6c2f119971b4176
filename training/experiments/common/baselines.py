"""Linear attention for comparison, S_t = e^g S_{t-1} + k_t v_t^T, y_t = S_t^T q_t, in the blocks of two of the mixers.

"linear" in the Lattice paper's block: Katharopoulos et al., arXiv:2006.16236, without its normaliser (g = 0), or
with a decay per head and token, the recurrence of Mamba-2 (Dao and Gu, arXiv:2405.21060). "gla" in GKA's block. The
delta rule and TTT are variants of `LatticeMixer`.
"""

from dataclasses import astuple

import torch
import torch.nn.functional as F
from torch import nn
from transformers import initialization as init

from hf_memmix.conversion import AttentionWeights, TensorFate, starts
from hf_memmix.conversion.from_attention import gka as gka_start
from hf_memmix.mixers import GKAMixer, GKAOptions, MixerOptions, mixer_options
from hf_memmix.mixers.base import AttentionShape, MemoryMixer, register_mixer
from hf_memmix.mixers.layers import RMSNorm, ShortConvolution, at_least_fp32, init_layers, unit
from hf_memmix.padding import before_the_end
from hf_memmix_kernels import chunk_gla

EPS = 1e-6
GLA_GATE_BIAS = 1.2785  # silu of it is 1: measured by conversion/starts.py


@mixer_options
class LinearOptions(MixerOptions):
    """`decay`: g_t = log sigmoid(W x + b) per head, b spread over half-lives of 2 to 512 tokens; g = 0 without it."""

    decay: bool = False
    conv_size: int = 4


@register_mixer("linear")
class LinearMixer(MemoryMixer):
    """One projection for q and k, a short convolution for each, a GELU gate: `LatticeMixer` with another memory."""

    options_class = LinearOptions

    def __init__(self, config, layer_idx: int):
        super().__init__(config, layer_idx)
        hidden, self.heads, _, self.head_dim = astuple(AttentionShape.of(config))
        inner = self.heads * self.head_dim
        self.qk_proj = nn.Linear(hidden, inner, bias=False)
        self.v_proj = nn.Linear(hidden, inner, bias=False)
        self.g_proj = nn.Linear(hidden, inner, bias=False)
        self.o_proj = nn.Linear(inner, hidden, bias=False)
        self.q_conv1d = ShortConvolution(inner, self.options.conv_size, "silu")
        self.k_conv1d = ShortConvolution(inner, self.options.conv_size, "silu")
        self.o_norm = RMSNorm(self.head_dim, EPS)
        if self.options.decay:
            self.f_proj = nn.Linear(hidden, self.heads, bias=True)

    def project(self, x, rotary):
        tokens = {"qk": self.qk_proj(x), "v": self.v_proj(x)}
        if self.options.decay:
            tokens["log_decay"] = F.logsigmoid(at_least_fp32(self.f_proj(x)))
        return tokens

    def scan(self, tokens, states, lengths=None, cu_seqlens=None):
        past, where = states or {}, {"lengths": lengths, "cu_seqlens": cu_seqlens}
        q, conv_q = self.q_conv1d(tokens["qk"], past.get("conv_q"), **where)
        k, conv_k = self.k_conv1d(tokens["qk"], past.get("conv_k"), **where)
        q, k, v = (x.unflatten(-1, (-1, self.head_dim)) for x in (q, k, tokens["v"]))
        log_decay = tokens.get("log_decay")
        if log_decay is None:
            log_decay = at_least_fp32(q.new_zeros(q.shape[:3]))
        if lengths is not None:
            valid = before_the_end(lengths, q.shape[1])[..., None]
            v, log_decay = v * valid[..., None].to(v.dtype), log_decay * valid
        initial = past.get("S")
        y, S = chunk_gla(unit(q, EPS), unit(k, EPS), v, log_decay, initial_state=initial, cu_seqlens=cu_seqlens)
        return y, {"conv_q": conv_q, "conv_k": conv_k, "S": S}

    def readout(self, y, x):
        return self.o_proj(self.o_norm(y).flatten(2) * F.gelu(self.g_proj(x)))

    def state_shapes(self, batch, dtype=torch.float32):
        conv = ((batch, self.heads * self.head_dim, self.options.conv_size - 1), dtype)
        memory = (batch, self.heads, self.head_dim, self.head_dim)
        return {"conv_q": conv, "conv_k": conv, "S": (memory, torch.promote_types(dtype, torch.float32))}

    def init_weights(self):
        """N(0, 0.02) matrices and taps; a decay of e^g = 2^(-1 / half-life)."""
        init_layers(self)
        if self.options.decay:
            keep = 0.5 ** (1 / torch.linspace(1, 9, self.heads, device=self.f_proj.bias.device).exp2())
            init.copy_(self.f_proj.bias, keep.logit())


@mixer_options
class GLAOptions(GKAOptions):
    """`GKAOptions` without the blend of solution and query: there is no solution."""

    use_alpha: bool = False


@register_mixer("gla")
class GLAMixer(GKAMixer):
    """`GKAMixer` without the ridge: y = U q, gated linear attention with the same parameters and block.

    From attention it starts as GKA does, with an output gate that is `GLA_GATE_BIAS`.
    """

    options_class = GLAOptions
    step = MemoryMixer.step

    def scan(self, tokens, states, lengths=None, cu_seqlens=None):
        q, k, v, log_decay, beta, new = self.memory_inputs(tokens, states, lengths, cu_seqlens)
        # beta belongs to the query heads
        k, v = (x.repeat_interleave(self.heads // self.kv_heads, 2) for x in (k, v))
        if beta is not None:
            v = v * beta.square().to(v.dtype)[..., None]
        initial = states["U"] if states else None
        y, new["U"] = chunk_gla(q, k, v, log_decay, initial_state=initial, cu_seqlens=cu_seqlens, scale=1.0)
        return y, new

    def state_shapes(self, batch, dtype=torch.float32):
        return {name: shape for name, shape in super().state_shapes(batch, dtype).items() if name != "H"}


@starts("gla", options=gka_start.options_for)
@torch.no_grad()
def take_over(mixer: GLAMixer, attention: AttentionWeights) -> list[TensorFate]:
    """As GKA starts, with another output gate."""
    fates = gka_start.take_over(mixer, attention)
    if mixer.options.use_gate and mixer.options.gate_bias:
        mixer.g_proj.bias.fill_(GLA_GATE_BIAS)
    return fates
