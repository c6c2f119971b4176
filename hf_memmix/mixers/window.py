"""A window: the attention of the backbone over the last tokens of the context, and over its first ones.

    y_t = sum_s softmax(scale q_t k_s) v_s  over  t - window < s <= t  and  s < sinks;   out = W_o y

Its weights are those of the attention. For contexts up to the window it computes what the attention computes, and of
what lies further back it remembers nothing: the control of every other mixer, and a baseline that is hard to beat.
Attention sinks: Xiao et al., "Efficient Streaming Language Models with Attention Sinks", arXiv:2309.17453.

Shapes: B batch, T tokens, H query heads, Hk key/value heads, D head size.
"""

import dataclasses

import torch
from torch import nn
from transformers import initialization as init

from hf_memmix_kernels import chunk_window, window_step
from hf_memmix_kernels._common import MAX_HEAD_DIM
from hf_memmix_kernels.rowwise import rotate
from hf_memmix_kernels.window import window_state_shapes
from hf_memmix_kernels.window.arguments import Sizes
from hf_memmix_kernels.window.layer import window_layer_step

from ..backbones import backbone_of, layer_rotates, window_of
from ..errors import UserError
from ..mixer_names import DEFAULT_SINKS, DEFAULT_WINDOW
from .base import AttentionShape, MemoryMixer, register_mixer
from .kept_bytes import KeptBytes
from .layer_step import layer_around
from .layers import QK_NORMS, ROPE_LAYOUTS, RMSNorm, init_layers, one_angle_per_pair
from .options import LARGEST_WINDOW, MixerOptions, between, mixer_options, norm_eps, one_of
from .tp_plan import heads_plan

STATES = ("k", "v", "seen")


@mixer_options
class WindowOptions(MixerOptions):
    """Options of a window.

    Args:
        window: number of last tokens that a query reads, with its own. Tokens that a mask hides do not count; in a
            sliding window of transformers, also in a kept layer, they do. None: 512, or the sliding window of the
            layer's attention where it is shorter; a configuration holds the number if it is the same in all layers.
        sinks: number of first tokens of the context that every query reads as well. None: 1, or 0 where the window is
            the sliding window of the layer's attention, which does not read them. It is saved as `window` is.
        scale: factor of the scores; None is D^-1/2.
        softcap: the scores become softcap * tanh(scores / softcap), as in Gemma 2; None is no cap.
        sink_logits: one more logit per head in the softmax, which adds no value, as in GPT-OSS.
        use_rope: rotate q and k with the backbone's rotary embeddings.
        rope_layout: how the backbone lays out cos and sin, see `layers.ROPE_LAYOUTS`.
        qk_norm: None, "head" (an RMSNorm over each head) or "full" (over all heads) of q and k.
        output_gate: the output before W_o is multiplied by 2 sigmoid(W_g x), which is 1 for W_g = 0.
        unshare_kv_heads: every query head has keys and values of its own.
        qkv_bias, o_bias: biases of the projections.
        norm_eps: epsilon of the norms.
    """

    window: int | None = between(None, 1, LARGEST_WINDOW, f"number of tokens; the default is {DEFAULT_WINDOW}")
    sinks: int | None = between(None, 0, 64, "number of first tokens that stay visible; 0 is none")
    scale: float | int | None = between(None, 1e-6, 1e3, "factor of the scores; None is 1 / sqrt(head size)")
    softcap: float | int | None = between(None, 1e-3, 1e6, "Gemma 2's is 50; None is no cap")
    sink_logits: bool = False
    use_rope: bool = False
    rope_layout: str = one_of("half", ROPE_LAYOUTS)
    qk_norm: str | None = one_of(None, QK_NORMS)
    output_gate: bool = False
    unshare_kv_heads: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    norm_eps: float | int = norm_eps(1e-6)

    def validate_size(self):
        if self.local_window:
            raise UserError(f"local_window={self.local_window} is an option of memories; the size here is `window`")

    def validate_sinks(self):
        if None not in (self.window, self.sinks) and self.sinks > self.window:
            raise UserError(f"sinks={self.sinks} are more than window={self.window}; give at most the window")

    def of_layer(self, own: int | None) -> "WindowOptions":
        """These options with the defaults of a layer whose attention has a sliding window of `own` tokens, or none."""
        window = min(DEFAULT_WINDOW, own or DEFAULT_WINDOW) if self.window is None else self.window
        first = 0 if window == own else DEFAULT_SINKS
        return dataclasses.replace(self, window=window, sinks=first if self.sinks is None else self.sinks)


@register_mixer("window")
class WindowMixer(MemoryMixer):
    """Attention over a window.

    States: k and v [B, sinks + window, Hk, D] in the dtype of the activations, and seen [B, Hk] of int64, the number
    of tokens so far. Keys are stored after the rotary embedding.
    """

    summary = "attention over the last tokens, and over the first ones as [sinks](https://arxiv.org/abs/2309.17453)"
    kept_bytes = KeptBytes(3, queries=6, keys=4, heads=4)  # as attention
    options_class = WindowOptions
    no_weight_decay = ("sink_logits",)
    input_layers = ("q_proj", "k_proj", "v_proj")
    output_layers = ("g_proj",)

    def __init__(self, config, layer_idx: int, beside: int | None = None):
        """`beside`: size of a window beside a memory."""
        super().__init__(config, layer_idx)
        self.options = options = self.options_of(config, layer_idx, beside)
        shape = AttentionShape.of(config, options.unshare_kv_heads)
        shape.check(self, MAX_HEAD_DIM)
        self.hidden, self.heads, self.kv_heads, self.head_dim = dataclasses.astuple(shape)
        own = window_of(config, layer_idx)
        if own is not None and options.window > own:
            size = "local_window" if beside else "mixers['window']['window']"
            raise UserError(
                f"window={options.window} is longer than the sliding window of the attention of layer {layer_idx},"
                f" {own}; set {size} to at most {own}, or keep this layer as attention"
            )
        self.use_rope = options.use_rope and layer_rotates(config, layer_idx)
        self.norm_last = backbone_of(config).norm_last
        width, kv_width = self.heads * self.head_dim, self.kv_heads * self.head_dim
        self.q_proj = nn.Linear(self.hidden, width, bias=options.qkv_bias)
        self.k_proj = nn.Linear(self.hidden, kv_width, bias=options.qkv_bias)
        self.v_proj = nn.Linear(self.hidden, kv_width, bias=options.qkv_bias)
        self.o_proj = nn.Linear(width, self.hidden, bias=options.o_bias)
        if options.qk_norm is not None:
            full = options.qk_norm == "full"
            self.q_norm = RMSNorm(width if full else self.head_dim, options.norm_eps)
            self.k_norm = RMSNorm(kv_width if full else self.head_dim, options.norm_eps)
        if options.output_gate:
            self.g_proj = nn.Linear(self.hidden, width, bias=False)
        if options.sink_logits:
            self.sink_logits = nn.Parameter(torch.empty(self.heads))

    @classmethod
    def options_of(cls, config, layer_idx, beside: int | None = None):
        options = super().options_of(config, layer_idx)
        if beside:
            if (options.sinks or 0) > beside:
                raise UserError(
                    f"mixers['window']: sinks={options.sinks} are more than local_window={beside}; give at most these"
                )
            options = dataclasses.replace(options, window=beside)
        return options.of_layer(window_of(config, layer_idx))

    def project(self, x, rotary):
        if self.use_rope and rotary is None:
            raise UserError(
                "use_rope=True, but this backbone has no rotary embeddings; set mixers['window']['use_rope'] to False"
            )
        products = self.products(x)
        angles = [one_angle_per_pair(t, self.plain["rope_layout"]) for t in rotary] if self.use_rope else None
        q, k = (self._placed(products[f"{role}_proj"], role, angles) for role in "qk")
        tokens = {"q": q, "k": k, "v": products["v_proj"].unflatten(-1, (-1, self.head_dim))}
        return tokens | self.joined_products(products)

    def _placed(self, x, role: str, angles):
        """[B, T, C] of the projection of q or k -> [B, T, heads, D] with its norm and rotation."""
        kind = self.plain["qk_norm"]
        if kind == "full":
            x = getattr(self, f"{role}_norm")(x)
        x = x.unflatten(-1, (-1, self.head_dim))
        if kind == "head" and not self.norm_last:
            x = getattr(self, f"{role}_norm")(x)
        if angles is not None:
            x = rotate(x, *angles)
        return getattr(self, f"{role}_norm")(x) if kind == "head" and self.norm_last else x

    def scan(self, tokens, states, lengths=None, cu_seqlens=None):
        state = None if states is None else tuple(states[name] for name in STATES)
        where = {"lengths": lengths, "cu_seqlens": cu_seqlens, "initial_state": state}
        y, after = chunk_window(*self._heads(tokens), **where, **self._attention())
        return y, dict(zip(STATES, after, strict=True))

    def packed_outputs(self, tokens, cu_seqlens):
        where = {"cu_seqlens": cu_seqlens, "final_state": False}
        return chunk_window(*self._heads(tokens), **where, **self._attention())[0]

    def step(self, tokens, states, state_indices=None):
        state = tuple(states[name] for name in STATES)
        return window_step(*self._heads(tokens), state, state_indices=state_indices, **self._attention())

    def layer_step(self, x, rotary, states):
        options = self.plain
        if options["output_gate"] or (options["qk_norm"] is not None and self.norm_last):
            return None
        layer = layer_around("window", self, x, rotary, states)
        if layer is None:
            return None
        scale = self.head_dim**-0.5 if options["scale"] is None else options["scale"]
        sizes = Sizes(options["window"], options["sinks"], scale, options["softcap"])
        state = tuple([states[name] for name in STATES])
        return window_layer_step(layer, state, sizes, self.sink_logits if options["sink_logits"] else None)

    def readout(self, y, x, tokens=None):
        y = y.flatten(2)
        if self.plain["output_gate"]:
            y = y * (2 * self.output_product("g_proj", x, tokens).sigmoid())
        return self.o_proj(y)

    def kept_for_backward(self):
        # the gate reads the input; kept are its sigmoid, twice that, and the product with y
        gate = KeptBytes(1, queries=6) if self.options.output_gate else KeptBytes(0)
        return self.kept_bytes + gate

    def state_shapes(self, batch, dtype=torch.float32):
        sizes = self.plain["window"], self.plain["sinks"]
        shapes = window_state_shapes(batch, self.kv_heads, self.head_dim, *sizes)
        return dict(zip(STATES, zip(shapes, (dtype, dtype, torch.long), strict=True), strict=True))

    def init_weights(self):
        """N(0, 0.02) matrices, zero biases and logits, unit norms."""
        init_layers(self)
        if self.options.sink_logits:
            init.zeros_(self.sink_logits)

    def tp_plan(self, ranks):
        wide = ("q_norm", "k_norm") if self.options.qk_norm == "full" else ()
        return heads_plan(
            self, ranks, ("q_proj", "g_proj", "sink_logits", *wide[:1]), ("k_proj", "v_proj", *wide[1:]), wide
        )

    def _heads(self, tokens):
        """q, k and v; a norm or an angle in fp32 may have made q and k wider than v."""
        v = tokens["v"]
        return tokens["q"].to(v.dtype), tokens["k"].to(v.dtype), v

    def _attention(self) -> dict:
        own = {name: self.plain[name] for name in ("window", "sinks", "scale", "softcap")}
        return own | {"sink_logits": self.sink_logits if self.plain["sink_logits"] else None}
