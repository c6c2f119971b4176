"""COFFEE, context from feedback: n scalar states per feature, each of which gates its own update.

    s_k = sigmoid(w x_{k-1});  x_k = (1 + lambda s_k) x_{k-1} + s_k u_k;  y_k = sum_j C_j x_{k,j}
    u = silu(conv(W_u h));  out = W_o (RMSNorm(y) * silu(W_z h))

Paper: Zattra et al., "Context-Selective State Space Models: Feedback is All You Need", eq. 5, 7 and Remark 2. The
paper tests the layer alone and names a Mamba-like block as the next step. This file is that block.

Shapes: B batch, T tokens, D features (`inner_size`), n states.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn
from transformers import initialization as init

from hf_memmix_kernels import check_coffee, chunk_coffee, coffee_step
from hf_memmix_kernels.coffee.arguments import Parameters
from hf_memmix_kernels.coffee.layer import coffee_layer_step
from hf_memmix_kernels.coffee.op import MAX_STATES

from ..errors import UserError
from ..padding import before_the_end
from .base import MemoryMixer, register_mixer
from .half_lives import decay_rates, half_lives
from .kept_bytes import KeptBytes
from .layer_step import layer_around
from .layers import CONV_ACTIVATIONS, RMSNorm, ShortConvolution, at_least_fp32, init_layers
from .options import MixerOptions, between, conv_size, mixer_options, norm_eps, one_of
from .tp_plan import plan_of, share

MAX_FEATURES = 2**20
TIME_SCALES = (1.0, 1000.0)  # tokens after which 1 / e of a state is left, before training, when its gate is one half


@mixer_options
class CoffeeOptions(MixerOptions):
    """Options of the COFFEE layer.

    Args:
        states: n, the number of states per feature, at most 64.
        inner_size: number of features D; None is twice the hidden size, as in Mamba.
        half_lives: the shortest and the longest half-life of the states in tokens, log-spaced, before training, while
            their gates are one half. None: 0.7 to 700, at random, or those of the start from attention.
        use_output_filter: y <- sigmoid(w_filter . x) y (Remark 2).
        conv_size: taps of the short convolution of u.
        conv_activation: "silu", or None, which keeps the sign of u, as a conversion from attention needs it.
        use_o_norm: RMSNorm of y over all features.
        use_gate, gate_bias: the output gate silu(W_z h), and its bias, with which it can start open.
        u_bias, o_bias: biases of the projections to u and to the output.
        norm_eps: epsilon of the RMSNorm.
    """

    states: int = between(16, 1, MAX_STATES, "the paper has 1 to 16")
    inner_size: int | None = between(None, 1, MAX_FEATURES, "None is twice the hidden size")
    half_lives: list[float | int] | None = half_lives()
    use_output_filter: bool = False
    conv_size: int = conv_size()
    conv_activation: str | None = one_of("silu", CONV_ACTIVATIONS)
    use_o_norm: bool = True
    use_gate: bool = True
    gate_bias: bool = False
    u_bias: bool = False
    o_bias: bool = False
    norm_eps: float | int = norm_eps(1e-6)


@register_mixer("coffee")
class CoffeeMixer(MemoryMixer):
    """The COFFEE layer. States: x [B, D, n] in fp32 and conv_u [B, D, taps - 1].

    The paper requires a stable I + A, which means lambda in [-2, 0]. Here lambda = -2 sigmoid(`lam_logit`). This is in
    the range for every finite parameter, so no optimizer step and no file can leave it; and it is smooth, so no
    gradient vanishes at a bound.
    """

    summary = (
        "COFFEE: a few scalar states per feature; each state opens and closes its own input gate "
        "(Zattra et al., Context-Selective State Space Models: Feedback is All You Need)"
    )
    options_class = CoffeeOptions
    kept_bytes = KeptBytes(2, hidden=29.7)  # measured beside gka
    fp32_parameters = no_weight_decay = ("lam_logit", "w", "C", "w_filter")
    lora_targets = ("u_proj", "o_proj")
    input_layers = ("u_proj",)
    output_layers = ("z_proj",)

    def __init__(self, config, layer_idx: int):
        super().__init__(config, layer_idx)
        options, hidden = self.options, config.hidden_size
        self.features = options.inner_size or 2 * hidden
        self.u_proj = nn.Linear(hidden, self.features, bias=options.u_bias)
        self.u_conv1d = ShortConvolution(self.features, options.conv_size, options.conv_activation)
        for name in self._state_parameters():
            setattr(self, name, nn.Parameter(torch.empty(self.features, options.states, dtype=torch.float32)))
        if options.use_gate:
            self.z_proj = nn.Linear(hidden, self.features, bias=options.gate_bias)
        if options.use_o_norm:
            self.o_norm = RMSNorm(self.features, options.norm_eps)
        self.o_proj = nn.Linear(self.features, hidden, bias=options.o_bias)

    def project(self, x, rotary):
        products = self.products(x)
        return {"u": products["u_proj"]} | self.joined_products(products)

    def scan(self, tokens, states, lengths=None, cu_seqlens=None):
        past, where = states or {}, {"lengths": lengths, "cu_seqlens": cu_seqlens}
        u, conv_u = self.u_conv1d(tokens["u"], past.get("conv_u"), **where)
        # a closed gate does not change the state
        gate = None if lengths is None else before_the_end(lengths, u.shape[1]).to(u.dtype)
        y, x = chunk_coffee(
            u,
            **self._recurrence(),
            gate=gate,
            initial_state=past.get("x"),
            cu_seqlens=cu_seqlens,
        )
        return y, {"conv_u": conv_u, "x": x}

    def step(self, tokens, states, state_indices=None):
        u, _ = self.u_conv1d(tokens["u"], states["conv_u"], in_place=True, state_indices=state_indices)
        return coffee_step(u, **self._recurrence(), state=states["x"], state_indices=state_indices)

    def layer_step(self, x, rotary, states):
        gate = ("z_proj",) if self.plain["use_gate"] else ()
        layer = layer_around("coffee", self, x, None, states, gate, value="u", activation="silu")
        if layer is None:
            return None
        w_filter = self.w_filter if self.plain["use_output_filter"] else None
        return coffee_layer_step(layer, Parameters(self.lam_logit, self.w, self.C, w_filter), states["x"])

    def readout(self, y, x, tokens=None):
        gate = self.output_product("z_proj", x, tokens) if self.plain["use_gate"] else None
        if self.plain["use_o_norm"]:
            y = self.o_norm(y, gate)
        elif gate is not None:
            y = y * F.silu(gate)
        return self.o_proj(y)

    def lam(self) -> torch.Tensor:
        """lambda [D, n] in [-2, 0]."""
        return -2 * at_least_fp32(self.lam_logit).sigmoid()

    def state_shapes(self, batch, dtype=torch.float32):
        return {
            "conv_u": ((batch, self.features, self.options.conv_size - 1), dtype),
            "x": ((batch, self.features, self.options.states), torch.promote_types(dtype, torch.float32)),
        }

    def tp_plan(self, ranks):
        """By channels."""
        norm = ("o_norm",) if self.options.use_o_norm else ()
        return plan_of(
            self,
            ranks,
            [(ranks, ("u_proj", "u_conv1d", "z_proj", *self._state_parameters(), *norm))],
            rows=("o_proj",),
            sizes={"features": share(self, "channels", self.features, ranks)},
            wide_norms=norm,
        )

    def init_weights(self):
        """N(0, 0.02) matrices and taps, zero biases, unit norms; time scales log-uniform in `TIME_SCALES`.

        w ~ N(0, 1) as in the paper and C ~ N(0, 1 / n). Both are divided by the size that a state of that time scale
        has with white inputs, so that slow states do not saturate their gate and do not dominate the output.
        """
        init_layers(self)
        kept = self.start_kept()
        init.copy_(self.lam_logit, torch.logit(1 - kept))
        size = 0.5 / (1 - kept.square()).sqrt()
        init.copy_(self.w, torch.randn_like(size) / size)
        init.copy_(self.C, torch.randn_like(size) / size / self.options.states**0.5)
        if self.options.use_output_filter:
            init.zeros_(self.w_filter)

    def start_kept(self) -> torch.Tensor:
        """1 + lambda / 2 [D, n], what a gate of one half keeps of a state, before training."""
        if self.options.half_lives is not None:
            rates = decay_rates(self.options.half_lives, self.options.states)
            return torch.exp(-rates).to(self.lam_logit.device).expand_as(self.lam_logit)
        low, high = (math.log(t) for t in TIME_SCALES)
        return torch.exp(-1 / torch.empty_like(self.lam_logit).uniform_(low, high).exp())

    @classmethod
    def check_states(cls, options, states):
        """States must be finite: a value that is not finite never becomes finite again."""
        check_coffee(state=states["x"])

    def check_weights(self):
        """`lam_logit` must not be NaN (other values give a lambda in [-2, 0]); w, C and w_filter must be finite."""
        for name in self._state_parameters():
            parameter = getattr(self, name).detach()
            bad = parameter.isnan() if name == "lam_logit" else ~parameter.isfinite()
            if parameter.device.type != "meta" and bad.any():
                raise UserError(
                    f"layer {self.layer_idx}: {int(bad.sum())} values of {name} are not finite, for example"
                    f" {parameter[bad][0]}; load a checkpoint from before training diverged"
                )

    def _state_parameters(self) -> tuple[str, ...]:
        return ("lam_logit", "w", "C", "w_filter") if self.options.use_output_filter else ("lam_logit", "w", "C")

    def _recurrence(self) -> dict:
        w_filter = at_least_fp32(self.w_filter) if self.plain["use_output_filter"] else None
        return {"lam": self.lam(), "w": at_least_fp32(self.w), "C": at_least_fp32(self.C), "w_filter": w_filter}
