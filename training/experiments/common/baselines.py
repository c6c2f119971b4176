"""Linear attention as a baseline: S_t = e^g S_{t-1} + k_t v_t^T, y_t = S_t^T q_t.

Each mixer uses the projections, convolutions and gates of another mixer, so that only the memory differs.

- "linear" uses the block of the Lattice paper. With g = 0 it is the linear attention of Katharopoulos et al.,
  arXiv:2006.16236, without the normaliser. With a decay per head and token it is the recurrence of Mamba-2 (Dao and
  Gu, arXiv:2405.21060).
- "gla" (gated linear attention) uses the block of GKA.
- "gdn" (Gated DeltaNet; Yang et al., arXiv:2412.06464) uses the block of Lattice.
- "mamba2-no-vconv" is Mamba-2 whose x has no short convolution; B and C, its keys and queries, keep theirs.

The other baselines, the delta rule and TTT, are variants of `LatticeMixer`.
"""

from dataclasses import astuple

import torch
import torch.nn.functional as F
from torch import nn
from transformers import initialization as init

from hf_memmix.mixers import GKAMixer, GKAOptions, LatticeMixer, LatticeOptions, MixerOptions, mixer_options
from hf_memmix.mixers.base import AttentionShape, MemoryMixer, register_mixer
from hf_memmix.mixers.layers import RMSNorm, ShortConvolution, at_least_fp32, init_layers
from hf_memmix.mixers.mamba2 import Mamba2Mixer, Mamba2Options
from hf_memmix.padding import before_the_end
from hf_memmix_kernels import chunk_gla
from hf_memmix_kernels.rowwise import unit_heads

EPS = 1e-6


@mixer_options
class LinearOptions(MixerOptions):
    """Options of `LinearMixer`.

    decay: use g_t = log sigmoid(W x + b) per head. At the start, b gives the heads half-lives of 2 to 512 tokens.
        Without this option g is 0.
    conv_size: taps of the short convolutions.
    use_v_conv: whether v, like q and k, passes through a short convolution.
    """

    decay: bool = False
    conv_size: int = 4
    use_v_conv: bool = False


@register_mixer("linear")
class LinearMixer(MemoryMixer):
    """The block of `LatticeMixer` with linear attention as its memory.

    q and k share one projection and have a short convolution each; a GELU gate multiplies the output. States: S
    [B, H, d, d] in fp32, conv_q, conv_k and, with `use_v_conv`, conv_v [B, H d, taps - 1].
    """

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
        if self.options.use_v_conv:
            self.v_conv1d = ShortConvolution(inner, self.options.conv_size, "silu")
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
        v, new = tokens["v"], {}
        q, new["conv_q"] = self.q_conv1d(tokens["qk"], past.get("conv_q"), **where)
        k, new["conv_k"] = self.k_conv1d(tokens["qk"], past.get("conv_k"), **where)
        if self.options.use_v_conv:
            v, new["conv_v"] = self.v_conv1d(v, past.get("conv_v"), **where)
        q, k, v = (x.unflatten(-1, (-1, self.head_dim)) for x in (q, k, v))
        log_decay = tokens.get("log_decay")
        if log_decay is None:
            log_decay = at_least_fp32(q.new_zeros(q.shape[:3]))
        if lengths is not None:
            valid = before_the_end(lengths, q.shape[1])[..., None]
            v, log_decay = v * valid[..., None].to(v.dtype), log_decay * valid
        initial = past.get("S")
        q, k = (unit_heads(x, None, None, EPS) for x in (q, k))
        y, new["S"] = chunk_gla(q, k, v, log_decay, initial_state=initial, cu_seqlens=cu_seqlens)
        return y, new

    def readout(self, y, x, tokens=None):
        return self.o_proj(self.o_norm(y).flatten(2) * F.gelu(self.output_product("g_proj", x, tokens)))

    def state_shapes(self, batch, dtype=torch.float32):
        conv = ((batch, self.heads * self.head_dim, self.options.conv_size - 1), dtype)
        memory = (batch, self.heads, self.head_dim, self.head_dim)
        convs = dict.fromkeys(("conv_q", "conv_k", *(["conv_v"] if self.options.use_v_conv else [])), conv)
        return convs | {"S": (memory, torch.promote_types(dtype, torch.float32))}

    def init_weights(self):
        """Draw matrices and convolution taps from N(0, 0.02); set the decay to e^g = 2^(-1 / half-life)."""
        init_layers(self)
        if self.options.decay:
            keep = 0.5 ** (1 / torch.linspace(1, 9, self.heads, device=self.f_proj.bias.device).exp2())
            init.copy_(self.f_proj.bias, keep.logit())


@mixer_options
class GLAOptions(GKAOptions):
    """`GKAOptions` with `use_alpha` off: GLA solves no ridge regression, so there is no solution to mix with the
    query.
    """

    use_alpha: bool = False

    def validate_sketch_dim(self):
        if self.sketch_dim is not None:
            raise ValueError(
                f"sketch_dim={self.sketch_dim} is of GKA's ridge regression; GLA solves none, leave it None"
            )


@register_mixer("gla")
class GLAMixer(GKAMixer):
    """Gated linear attention, y = U q, with the parameters and the block of `GKAMixer` but without the ridge
    regression.
    """

    options_class = GLAOptions
    step = MemoryMixer.step

    def scan(self, tokens, states, lengths=None, cu_seqlens=None):
        q, k, v, log_decay, beta, new = self.memory_inputs(tokens, states, lengths, cu_seqlens)
        # beta has one value per query head, so keys and values are repeated for the query heads first
        k, v = (x.repeat_interleave(self.heads // self.kv_heads, 2) for x in (k, v))
        if beta is not None:
            v = v * beta.square().to(v.dtype)[..., None]
        initial = states["U"] if states else None
        y, new["U"] = chunk_gla(q, k, v, log_decay, initial_state=initial, cu_seqlens=cu_seqlens, scale=1.0)
        return y, new

    def state_shapes(self, batch, dtype=torch.float32):
        return {name: shape for name, shape in super().state_shapes(batch, dtype).items() if name != "H"}


@mixer_options
class GDNOptions(LatticeOptions):
    """`LatticeOptions` with the delta rule and a forget gate."""

    variant: str = "delta"
    use_forget_gate: bool = True


@register_mixer("gdn")
class GDNMixer(LatticeMixer):
    """Gated DeltaNet: S_t = mu_t S_{t-1} (I - beta_t k k^T) + beta_t v k^T, in the block of `LatticeMixer`.

    Lattice's delta rule with a forget gate, mu S - gamma (S k - v) k^T, computes the error before the slots decay, GDN
    after. With gamma = mu beta and v / mu in the place of v, Lattice's rule is that of GDN.
    """

    options_class = GDNOptions

    def project(self, x, rotary):
        tokens = super().project(x, rotary)
        return tokens | {"gamma": tokens["gamma"] * tokens["log_decay"].exp()}

    def heads_for_memory(self, q, k, v, tokens):
        q, k, v = super().heads_for_memory(q, k, v, tokens)
        return q, k, (v * tokens["log_decay"].neg().exp()[..., None]).to(v.dtype)


class ConvolutionWithoutX(ShortConvolution):
    """Mamba-2's convolution, of B and C only. Its input is [x | B | C]; x stays as it is.

    Without its convolution x has no SiLU either, like v of the other mixers.
    """

    def __init__(self, features: int, convolved: int, taps: int, bias: bool):
        super().__init__(convolved, taps, "silu", bias=bias)
        self.sizes = (features, convolved)

    def forward(self, xBC, state=None, **where):
        x, BC = xBC.split(self.sizes, -1)
        BC, state = super().forward(BC, state, **where)
        return torch.cat([x, BC], -1), state


@mixer_options
class Mamba2WithoutXConvOptions(Mamba2Options):
    """`Mamba2Options`; a mixer has a class of options of its own."""


@register_mixer("mamba2-no-vconv")
class Mamba2WithoutXConvMixer(Mamba2Mixer):
    """Mamba-2 without the short convolution of x, for training from scratch on one device."""

    options_class = Mamba2WithoutXConvOptions
    convolves = "q, k"

    def __init__(self, config, layer_idx: int):
        super().__init__(config, layer_idx)
        options, convolved = self.options, self.conv_dim - self.features
        self.conv1d = ConvolutionWithoutX(self.features, convolved, options.conv_size, options.use_conv_bias)

    def convolved(self, tokens):
        return {"conv": (tokens["xBC"][..., self.features :], self.options.conv_size - 1)}

    def state_shapes(self, batch, dtype=torch.float32):
        conv = ((batch, self.conv_dim - self.features, self.options.conv_size - 1), dtype)
        return super().state_shapes(batch, dtype) | {"conv": conv}
