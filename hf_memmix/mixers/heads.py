"""The layers before and after the memory of a mixer that has the heads of attention, as GKA and Lattice have them.

    before: q, k, v = W x;  norms of q and k;  short convolutions;  rotary embeddings
    after:  out = W_o (norm per head(y) * gate(W_g x))

Shapes: B batch, T tokens, H query heads, Hk key/value heads, D head size of v, K head size of q and k.
"""

import dataclasses
from typing import ClassVar

from torch import nn

from hf_memmix_kernels.rowwise import ACTIVATIONS, rotate, unit_heads
from hf_memmix_kernels.short_conv import Convolution, prompt_heads, runs_prompt_heads, unit_heads_after_convolutions

from ..backbones import layer_rotates
from ..errors import UserError
from .base import AttentionShape, MemoryMixer
from .layer_step import layer_around
from .layers import CONV_ACTIVATIONS, QK_NORMS, ROPE_LAYOUTS, RMSNorm, ShortConvolution, has_hooks, one_angle_per_pair
from .options import MixerOptions, conv_size, mixer_options, norm_eps, one_of
from .tp_plan import heads_plan

UNIT_EPS = 1e-6  # added to the norm of q and k, as in the GKA release


@mixer_options
class HeadsOptions(MixerOptions):
    """Options of such mixers, beside those of the subclass.

    Args:
        use_v_conv: whether v, like q and k, passes through a short convolution.
        conv_size: taps of the short convolutions.
        conv_activation: "silu", or None, which keeps the signs of q and k, as a conversion from attention needs it.
        use_rope: rotate q and k with the backbone's rotary embeddings, after the convolution.
        rope_layout: how the backbone lays out cos and sin, see `layers.ROPE_LAYOUTS`.
        use_o_norm: RMSNorm of each head's output. Without it the memory's output is unscaled, its size like that of
            the values.
        use_gate, gate_bias: the output gate, and its bias, with which it can start open.
        qk_norm: None, "head" (an RMSNorm over each head, as in Qwen3) or "full" (over all heads, as in OLMo 2) of q
            and k before the convolution.
        qkv_bias, o_bias: biases of the projections.
        norm_eps: epsilon of all RMSNorms.
    """

    use_v_conv: bool = True
    conv_size: int = conv_size()
    conv_activation: str | None = one_of("silu", CONV_ACTIVATIONS)
    use_rope: bool = False
    rope_layout: str = one_of("half", ROPE_LAYOUTS)
    use_o_norm: bool = True
    use_gate: bool = True
    gate_bias: bool = False
    qk_norm: str | None = one_of(None, QK_NORMS)
    qkv_bias: bool = False
    o_bias: bool = False
    norm_eps: float | int = norm_eps(1e-6)


class HeadsMixer(MemoryMixer):
    """Base class of such mixers. The `__init__` of a subclass calls `add_inputs`, makes the subclass's own parameters
    and calls `add_output`. The subclass also defines the computation between `convolve` and `readout`.

    It reads `HeadsOptions` and, if the subclass has the option, unshare_kv_heads.
    """

    max_head_dim: ClassVar[int]  # largest head size of the kernels
    input_layers: ClassVar[tuple[str, ...]] = ("qk_proj", "q_proj", "k_proj", "v_proj")  # and those of the subclass
    output_layers: ClassVar[tuple[str, ...]] = ("g_proj",)
    head_parameters: ClassVar[tuple[str, ...]]  # names of the subclass's layers and parameters with one row per head
    kv_head_parameters: ClassVar[tuple[str, ...]] = ()  # names of those with one row per key/value head
    gate_layers: ClassVar[tuple[str, ...]] = ("g_proj",)  # of the output gate, one after the other
    gate_activation: ClassVar[str] = "silu"  # a key of rowwise.ACTIVATIONS

    def __init__(self, config, layer_idx: int):
        super().__init__(config, layer_idx)
        shape = AttentionShape.of(config, getattr(self.options, "unshare_kv_heads", False))
        shape.check(self, self.max_head_dim)
        self.use_rope = self.options.use_rope and layer_rotates(config, layer_idx)
        self.hidden, self.heads, self.kv_heads, self.head_dim = dataclasses.astuple(shape)

    def add_inputs(self, key_dim: int, share_qk: bool = False, convolve_v: bool = False):
        """Make the projections, also that of the output, and the short convolutions.

        Args:
            key_dim: K.
            share_qk: whether q and k share one projection; both then have H heads.
            convolve_v: whether v also passes through a short convolution.
        """
        options = self.options
        self.key_dim, self.key_heads = key_dim, self.heads if share_qk else self.kv_heads
        q_width, k_width, v_width = self.heads * key_dim, self.key_heads * key_dim, self.kv_heads * self.head_dim
        if share_qk:
            self.qk_proj = nn.Linear(self.hidden, q_width, bias=options.qkv_bias)
        else:
            self.q_proj = nn.Linear(self.hidden, q_width, bias=options.qkv_bias)
            self.k_proj = nn.Linear(self.hidden, k_width, bias=options.qkv_bias)
        self.v_proj = nn.Linear(self.hidden, v_width, bias=options.qkv_bias)
        self.o_proj = nn.Linear(self.heads * self.head_dim, self.hidden, bias=options.o_bias)
        self.q_conv1d = ShortConvolution(q_width, options.conv_size, options.conv_activation)
        self.k_conv1d = ShortConvolution(k_width, options.conv_size, options.conv_activation)
        self.v_conv1d = ShortConvolution(v_width, options.conv_size, options.conv_activation) if convolve_v else None

    def add_output(self):
        """Make the output gate, the norms of q and k, and the norm of the output."""
        options = self.options
        if options.use_gate:
            self.add_gate()
        if options.qk_norm is not None:
            q_heads, k_heads = (self.heads, self.key_heads) if options.qk_norm == "full" else (1, 1)
            self.q_norm = RMSNorm(q_heads * self.key_dim, options.norm_eps)
            self.k_norm = RMSNorm(k_heads * self.key_dim, options.norm_eps)
        if options.use_o_norm:
            self.o_norm = RMSNorm(self.head_dim, options.norm_eps)

    def add_gate(self):
        """Make the output gate."""
        self.g_proj = nn.Linear(self.hidden, self.heads * self.head_dim, bias=self.options.gate_bias)

    def project_heads(self, products, rotary):
        """q, k and v [B, T, C], with norms of q and k; cos and sin [B, T, r / 2] if they will be rotated.

        `products`: of the layer's input.
        """
        options = self.plain
        if "qk_proj" in products:
            q = k = products["qk_proj"]
        else:
            q, k = products["q_proj"], products["k_proj"]
        if options["qk_norm"] == "full":
            q, k = self.q_norm(q), self.k_norm(k)
        elif options["qk_norm"] == "head":
            q, k = (norm(self._key_heads(t)).flatten(2) for norm, t in ((self.q_norm, q), (self.k_norm, k)))
        tokens = {"q": q, "k": k, "v": products["v_proj"]} | self.joined_products(products)
        if self.use_rope:
            tokens["cos"], tokens["sin"] = self.angles(rotary)
        return tokens

    def angles(self, rotary):
        """cos and sin, with one angle per pair of channels.

        Raises:
            ValueError: the backbone has no rotary embeddings.
        """
        if rotary is None:
            raise UserError(
                f"use_rope=True, but this backbone has no rotary embeddings; set mixers[{self.name!r}]['use_rope'] to"
                " False"
            )
        return tuple(one_angle_per_pair(t, self.plain["rope_layout"]) for t in rotary)

    def convolve(self, tokens, states, lengths, cu_seqlens):
        """q, k and v [B, T, C] after the short convolutions, and the states of the convolutions."""
        past, convolved, new = states or {}, dict(tokens), {}
        for name, convolution in self._convolutions():
            convolved[name], new[f"conv_{name}"] = convolution(
                tokens[name], past.get(f"conv_{name}"), lengths=lengths, cu_seqlens=cu_seqlens
            )
        return convolved["q"], convolved["k"], convolved["v"], new

    def heads_scan(self, tokens, states, lengths, cu_seqlens):
        """`convolve` and `split_heads` with unit norms, in one call where that is possible."""
        found = self._prompt_heads(tokens, states or {}) if lengths is None and cu_seqlens is None else None
        if found is not None:
            return found
        q, k, v, new = self.convolve(tokens, states, lengths, cu_seqlens)
        return *self.split_heads(q, k, v, tokens, unit_norm=True), new

    def _prompt_heads(self, tokens, states):
        """q, k and v of `heads_scan` and the new states in one call of kernels, or None where that is not possible."""
        parts = self._parts(tokens, states) if runs_prompt_heads(tokens["q"]) else None
        if parts is None:
            return None
        parts = [part if part.state is None else part._replace(state=part.state.to(part.x.dtype)) for part in parts]
        found = prompt_heads(parts, *self._norm_options(tokens))
        if found is None:
            return None
        q, k, v, *new = found
        new = {f"conv_{name}": state for name, state in zip("qkv", new, strict=True) if state is not None}
        return q, k, _by_heads(v, self.head_dim), new

    def _parts(self, tokens, states):
        """q, k and v before their convolutions, as one call for all of them takes them; None if that call is not
        allowed: hooks of a convolution (offload) or a module around it (PEFT's adapter of a weight) would not run, and
        a part of its weight may be elsewhere.
        """
        layers, parts = self._modules, []  # quicker than attributes
        for name, head_dim in (("q", self.key_dim), ("k", self.key_dim), ("v", 0)):
            layer, weight = layers.get(f"{name}_conv1d"), None
            if layer is not None:
                if type(layer) is not ShortConvolution or has_hooks(layer):
                    return None
                weight = layer.weight.squeeze(1)
            parts.append(Convolution(tokens[name], weight, states.get(f"conv_{name}"), head_dim))
        return parts

    def _norm_options(self, tokens):
        """What such a call takes beside `_parts`: cos, sin, eps and whether the activation is SiLU."""
        return tokens.get("cos"), tokens.get("sin"), UNIT_EPS, self.plain["conv_activation"] == "silu"

    def convolved(self, tokens):
        return {f"conv_{name}": (tokens[name], self.options.conv_size - 1) for name, _ in self._convolutions()}

    def convolve_step(self, tokens, states, state_indices=None):
        """As `convolve`, for one token. The states of the convolutions, or their pages, are updated in place."""
        convolved, where = dict(tokens), {"in_place": True, "state_indices": state_indices}
        for name, convolution in self._convolutions():
            convolved[name], _ = convolution(tokens[name], states[f"conv_{name}"], **where)
        return convolved["q"], convolved["k"], convolved["v"]

    def heads_step(self, tokens, states, state_indices=None, unit_norm=True):
        """`convolve_step` and `split_heads` for one token: in one call where that is possible."""
        found = self._heads_at_once(tokens, states, state_indices) if unit_norm else None
        if found is not None:
            return found
        return self.split_heads(*self.convolve_step(tokens, states, state_indices), tokens, unit_norm=unit_norm)

    def _heads_at_once(self, tokens, states, state_indices):
        """q, k and v of `heads_step` in one call of native code or one kernel, or None where that is not possible."""
        parts = self._parts(tokens, states)
        if parts is None:
            return None
        parts = [part for part in parts if part.weight is not None]
        outputs = unit_heads_after_convolutions(parts, *self._norm_options(tokens), state_indices)
        if outputs is None:
            return None
        q, k, v = (*outputs, tokens["v"])[:3]
        return self._key_heads(q), self._key_heads(k), _by_heads(v, self.head_dim)

    def layer_around(self, op, x, rotary, states, unit_norm=True):
        """What lies around the memory for the native code of an op (`layer_step`), or None."""
        gate = self.gate_layers if self.plain["use_gate"] else ()
        options = {"unit_eps": UNIT_EPS if unit_norm else 0.0, "activation": self.gate_activation}
        return layer_around(op, self, x, rotary, states, gate, **options)

    def readout(self, y, x, tokens=None):
        gate = self.output_product("g_proj", x, tokens).view(y.shape) if self.plain["use_gate"] else None
        if self.plain["use_o_norm"]:
            y = self.o_norm(y, gate, self.gate_activation)
        elif gate is not None:
            y = y * ACTIVATIONS[self.gate_activation](gate)
        return self.o_proj(y.flatten(2))

    def tp_plan(self, ranks):
        """Divide the layers of `add_inputs` and `add_output`, `head_parameters` and `kv_head_parameters` by heads."""
        of_q, of_k, of_v = ["qk_proj", "q_proj", "q_conv1d"], ["k_proj", "k_conv1d"], ["v_proj", "v_conv1d"]
        wide = ("q_norm", "k_norm") if self.options.qk_norm == "full" else ()
        if wide:
            of_q, of_k = [*of_q, "q_norm"], [*of_k, "k_norm"]
        shared = self.key_heads == self.heads
        by_heads = [*of_q, *(of_k if shared else ()), "g_proj", *self.head_parameters]
        by_kv_heads = [*of_v, *(() if shared else of_k), *self.kv_head_parameters]
        plan = heads_plan(self, ranks, by_heads, by_kv_heads, wide)
        key_heads = plan.sizes["heads" if shared else "kv_heads"]
        return dataclasses.replace(plan, sizes={**plan.sizes, "key_heads": key_heads})

    def convolution_shapes(self, batch, dtype):
        """The shapes of the convolutions' states, a part of `state_shapes`."""
        widths = {
            "q": self.heads * self.key_dim,
            "k": self.key_heads * self.key_dim,
            "v": self.kv_heads * self.head_dim,
        }
        taps = self.options.conv_size - 1
        return {f"conv_{name}": ((batch, widths[name], taps), dtype) for name, _ in self._convolutions()}

    def _convolutions(self):
        """Pairs of "q", "k" or "v" and its convolution."""
        layers = self._modules  # quicker than attributes
        found = (("q", layers["q_conv1d"]), ("k", layers["k_conv1d"]), ("v", layers.get("v_conv1d")))
        return [(name, convolution) for name, convolution in found if convolution is not None]

    def split_heads(self, q, k, v, tokens, unit_norm: bool):
        """[B, T, C] after the convolutions -> q, k [B, T, H or Hk, K], rotated, and v [B, T, Hk, D].

        `unit_norm`: q and k then have norm 1.
        """
        q, k = self._key_heads(q), self._key_heads(k)
        angles = (tokens["cos"], tokens["sin"]) if self.use_rope else (None, None)
        if unit_norm:
            q, k = (unit_heads(t, *angles, UNIT_EPS) for t in (q, k))
        elif self.use_rope:
            q, k = (rotate(t, *angles) for t in (q, k))
        return q, k, _by_heads(v, self.head_dim)

    def _key_heads(self, x):
        return _by_heads(x, self.key_dim)


def _by_heads(x, size: int):
    """[..., C] -> [..., C / size, size]."""
    return x.unflatten(-1, (-1, size))
