"""Mamba-2: a linear recurrence with one decay per head, after a short convolution and before a gated norm.

    x, B, C = silu(conv(W_xBC h));  dt = softplus(W_dt h + bias);  S_t = e^(-e^A_log dt) S + dt x B^T;  y = S C + D x
    out = W_o RMSNorm(y * silu(W_z h))

Paper: Dao and Gu, "Transformers are SSMs" (arXiv:2405.21060). Parameter names and maths are those of transformers'
Mamba-2, so that a layer of a `state-spaces` checkpoint loads by name. Its recurrence is gated linear attention with
queries C, keys B and values dt x.

Shapes: B batch, T tokens, H heads, P head size, N state size, G groups.
"""

import math
from typing import ClassVar

import torch
from torch import nn
from transformers import initialization as init

from hf_memmix_kernels import chunk_gla, gla_step
from hf_memmix_kernels._common import MAX_HEAD_DIM
from hf_memmix_kernels._layer_step import runs_layer_step
from hf_memmix_kernels.gla.arguments import Mamba2
from hf_memmix_kernels.gla.layer import mamba2_layer_step
from hf_memmix_kernels.gla.op import CHUNK_SIZES
from hf_memmix_kernels.rowwise import decay, gated_norm

from ..errors import UserError
from ..padding import before_the_end
from .base import MemoryMixer, register_mixer
from .half_lives import decay_rates, half_lives, softplus_bias
from .kept_bytes import KeptBytes
from .layer_step import PLAIN, parameters_of
from .layers import ShortConvolution, at_least_fp32, init_layers
from .options import MixerOptions, between, checked, conv_size, mixer_options, norm_eps, one_of
from .ranks import decayed_sum
from .tp_plan import Cut, Part, plan_of, share

TIME_STEPS = (1e-3, 0.1)  # dt at the start, log-uniform
# a layer multiplies five features and squares the product; within these limits float32 does not overflow
LARGEST_FEATURE, LARGEST_READOUT = 1e6, 1e11


def _largest_feature(dtype: torch.dtype) -> float:
    """The limit of features of `dtype`. Each kernel clamps the features that it reads, so no clamped copy is kept."""
    return min(LARGEST_FEATURE, torch.finfo(dtype).max)


def _check_time_steps(limit: list | None):
    if limit is not None and not (len(limit) == 2 and 0 <= limit[0] < limit[1] < math.inf):
        raise UserError("must be two finite times, 0 <= smallest < largest, or None")


@mixer_options
class Mamba2Options(MixerOptions):
    """Options of the Mamba-2 layer; the defaults are those of the released models.

    Args:
        state_size: N, the number of columns of the state of a head.
        head_dim: P, features per head.
        expand: number of features divided by the hidden size.
        n_groups: G, the number of sets of B and C; the heads of a group share one set.
        conv_size: taps of the short convolution.
        use_conv_bias: whether the convolution has a bias.
        use_bias: whether the projections have biases.
        half_lives: the shortest and the longest half-life of the heads in tokens, log-spaced, before training. None:
            the released models' decays, or those of the start from attention.
        time_step_limit: smallest and largest dt, or None.
        chunk_size: tokens per chunk of the parallel form; changes only the speed.
        norm_eps: epsilon of the gated RMSNorm.
    """

    inference_options: ClassVar[tuple[str, ...]] = ("chunk_size",)

    state_size: int = between(128, 1, MAX_HEAD_DIM, "the limit of the kernels")
    head_dim: int = between(64, 1, MAX_HEAD_DIM, "the limit of the kernels")
    expand: float | int = between(2.0, 0.01, 64, "the released models have 2")
    n_groups: int = between(1, 1, 1024, "the released models have 1 to 8")
    conv_size: int = conv_size()
    use_conv_bias: bool = True
    use_bias: bool = False
    half_lives: list[float | int] | None = half_lives()
    time_step_limit: list[float | int] | None = checked(lambda: None, _check_time_steps)
    chunk_size: int = one_of(64, CHUNK_SIZES)
    norm_eps: float | int = norm_eps(1e-5)


class GatedRMSNorm(nn.Module):
    """RMSNorm(y * silu(z)) over groups of features, in fp32."""

    def __init__(self, features: int, groups: int, eps: float):
        super().__init__()
        self.groups, self.eps, self.average_over_ranks = groups, eps, None
        self.weight = nn.Parameter(torch.ones(features))

    def forward(self, y, z):
        """y and z [B, T, features]."""
        y, z = (t.unflatten(-1, (self.groups, -1)) for t in (y, z))
        limits = {"limit": LARGEST_READOUT, "gate_limit": _largest_feature(z.dtype)}
        ranks = {"average_over_ranks": self.average_over_ranks}
        return gated_norm(y, z, self.weight, self.eps, norm_first=False, **limits, **ranks).flatten(-2)


@register_mixer("mamba2")
class Mamba2Mixer(MemoryMixer):
    """The Mamba-2 layer. States: ssm [B, H, N, P] in fp32 and conv [B, H P + 2 G N, taps - 1]."""

    summary = "[Mamba-2](https://arxiv.org/abs/2405.21060): one matrix per head, which decays and adds each token"
    options_class = Mamba2Options
    kept_bytes = KeptBytes(1, hidden=23.1)  # measured beside gka
    fp32_parameters = no_weight_decay = ("A_log", "D", "dt_bias")
    lora_targets = ("in_proj", "out_proj")
    linear = True
    steering_layers = ("in_proj",)  # its last rows are the step sizes, which set the decay

    def __init__(self, config, layer_idx: int):
        super().__init__(config, layer_idx)
        options, hidden = self.options, config.hidden_size
        self.features = round(options.expand * hidden)
        self.heads, rest = divmod(self.features, options.head_dim)
        if rest or not self.heads or self.heads % options.n_groups:
            raise UserError(
                f"layer {layer_idx}: expand={options.expand} times the hidden size {hidden} gives {self.features}"
                f" features; they must be heads of head_dim={options.head_dim}, in n_groups={options.n_groups} groups"
            )
        self.groups = options.n_groups
        self.conv_dim = self.features + 2 * self.groups * options.state_size
        self.in_proj = nn.Linear(hidden, self.features + self.conv_dim + self.heads, bias=options.use_bias)
        self.conv1d = ShortConvolution(self.conv_dim, options.conv_size, "silu", bias=options.use_conv_bias)
        for name in self.fp32_parameters:
            setattr(self, name, nn.Parameter(torch.empty(self.heads, dtype=torch.float32)))
        self.norm = GatedRMSNorm(self.features, self.groups, options.norm_eps)
        self.out_proj = nn.Linear(self.features, hidden, bias=options.use_bias)

    def project(self, x, rotary):
        z, xBC, dt = self.in_proj(x).split([self.features, self.conv_dim, self.heads], -1)
        smallest, largest = (self.plain["time_step_limit"] or {0: None, 1: None}).values()
        limits = {"limit": _largest_feature(dt.dtype), "smallest": smallest, "largest": largest}
        dt, log_decay = decay(dt, self.dt_bias, self.A_log, **limits)
        return {"z": z, "xBC": xBC, "dt": dt, "log_decay": log_decay}

    def scan(self, tokens, states, lengths=None, cu_seqlens=None):
        past, xBC = states or {}, tokens["xBC"]
        where = {"lengths": lengths, "cu_seqlens": cu_seqlens, "limit": _largest_feature(xBC.dtype)}
        xBC, conv = self.conv1d(xBC, past.get("conv"), **where)
        dt, log_decay = tokens["dt"], tokens["log_decay"]
        if lengths is not None:
            # with dt = 0 a pad neither decays nor writes
            real = before_the_end(lengths, dt.shape[1])[..., None]
            dt, log_decay = (torch.where(real, t, 0) for t in (dt, log_decay))
        y, ssm = chunk_gla(
            **self._recurrence(xBC, dt, log_decay),
            initial_state=past.get("ssm"),
            cu_seqlens=cu_seqlens,
            chunk_size=self.options.chunk_size,
        )
        return self.norm(y.flatten(2), tokens["z"]), {"conv": conv, "ssm": ssm}

    def convolved(self, tokens):
        return {"conv": (tokens["xBC"], self.options.conv_size - 1)}

    def piece_writes(self, tokens, states):
        xBC, _ = self.conv1d(tokens["xBC"], states["conv"], limit=_largest_feature(tokens["xBC"].dtype))
        inputs = self._recurrence(xBC, tokens["dt"], tokens["log_decay"])
        return decayed_sum(inputs["k"], inputs["v"], inputs["log_decay"], inputs["beta"])

    def memory_states(self, memory):
        return {"ssm": memory}

    def step(self, tokens, states, state_indices=None):
        xBC = tokens["xBC"]
        where = {"in_place": True, "state_indices": state_indices, "limit": _largest_feature(xBC.dtype)}
        xBC, _ = self.conv1d(xBC, states["conv"], **where)
        y = gla_step(
            **self._recurrence(xBC, tokens["dt"], tokens["log_decay"]),
            state=states["ssm"],
            state_indices=state_indices,
        )
        return self.norm(y.flatten(2), tokens["z"])

    def readout(self, y, x, tokens=None):
        return self.out_proj(y)

    def layer_step(self, x, rotary, states):
        names = "in_proj", "out_proj", "conv1d", "norm"
        found = parameters_of(self, names, PLAIN | {GatedRMSNorm}) if runs_layer_step("gla", x) else None
        if found is None:
            return None
        (*weights, taps, norm), (*biases, conv_bias, _), conv, ssm = *found, states["conv"], states["ssm"]
        time_steps = (self.plain["time_step_limit"] or {0: 0, 1: math.inf}).values()
        limits = (_largest_feature(x.dtype), LARGEST_READOUT, *time_steps)
        rates, eps = (self.A_log, self.D, self.dt_bias), self.norm.eps
        layer = Mamba2(x.contiguous(), weights, biases, taps, conv_bias, conv, norm, *rates, ssm, eps, limits)
        return mamba2_layer_step(layer, self.groups)

    def state_shapes(self, batch, dtype=torch.float32):
        options = self.options
        return {
            "conv": ((batch, self.conv_dim, options.conv_size - 1), dtype),
            "ssm": (
                (batch, self.heads, options.state_size, options.head_dim),
                torch.promote_types(dtype, torch.float32),
            ),
        }

    def tp_plan(self, ranks):
        """The plan divides by heads, separately in each part of `in_proj` [z | x | B | C | dt] and of the convolution
        [x | B | C].

        With one group, every rank holds the whole group, and the mean square of the norm is averaged over the ranks.
        Several groups are divided among the ranks.
        """
        options, one_group = self.options, self.groups == 1
        heads = share(self, "heads", self.heads, ranks)
        groups = 1 if one_group else share(self, "groups", self.groups, ranks)
        features = Part(self.features, ranks)
        B = C = Part(self.groups * options.state_size, 1 if one_group else ranks)
        projected, convolved = Cut(0, (features, features, B, C, Part(self.heads, ranks))), Cut(0, (features, B, C))
        cuts = {"in_proj": projected, "conv1d": convolved}
        return plan_of(
            self,
            ranks,
            [(ranks, (*self.fp32_parameters, "norm"))],
            rows=("out_proj",),
            sizes={
                "heads": heads,
                "features": heads * options.head_dim,
                "groups": groups,
                "norm.groups": groups,
                "conv_dim": convolved.local_size(),
            },
            wide_norms=("norm",) if one_group else (),
            parameters={
                f"{name}.{leaf}": cut
                for name, cut in cuts.items()
                for leaf, _ in self.get_submodule(name).named_parameters()
            },
        )

    def init_weights(self):
        """N(0, 0.02) matrices, nn.Conv1d's taps, A = 1 .. H, D = 1, dt log-uniform in `TIME_STEPS`; with
        `half_lives`, these for dt = 1.
        """
        init_layers(self)
        bound = self.options.conv_size**-0.5
        init.uniform_(self.conv1d.weight, -bound, bound)
        init.ones_(self.norm.weight)
        init.ones_(self.D)
        if self.options.half_lives is not None:
            for parameter, value in zip(
                (self.A_log, self.dt_bias), self.decay_of(self.options.half_lives), strict=True
            ):
                init.copy_(parameter, value)
            return
        init.copy_(self.A_log, torch.arange(1, self.heads + 1, device=self.A_log.device).to(self.A_log.dtype).log())
        low, high = (math.log(t) for t in TIME_STEPS)
        dt = torch.empty_like(self.dt_bias).uniform_(low, high).exp()
        init.copy_(self.dt_bias, dt + torch.log(-torch.expm1(-dt)))  # softplus of it is dt

    def decay_of(self, half_lives: tuple[float, float]) -> tuple[torch.Tensor, torch.Tensor]:
        """`A_log` and `dt_bias` [H] with these half-lives for tokens whose dt is 1, log-spaced over the heads."""
        return decay_rates(half_lives, self.heads).log(), softplus_bias(torch.ones(self.heads))

    def _recurrence(self, xBC, dt, log_decay) -> dict:
        """The arguments of gated linear attention: queries C and keys B of a group, values x and gates of a head."""
        bc = self.groups * self.plain["state_size"]
        x, B, C = xBC.split([self.features, bc, bc], -1)
        B, C = (t.unflatten(-1, (self.groups, -1)) for t in (B, C))
        return {
            "q": C, "k": B, "v": x.unflatten(-1, (self.heads, -1)), "log_decay": log_decay,
            "beta": dt, "skip": at_least_fp32(self.D), "scale": 1.0,
        }  # fmt: skip
