"""Small layers that mixers share: short convolution, RMSNorm, angles of a rotary embedding; with their options.

Parameter names are those of nn.Conv1d, nn.Linear and transformers' norms, so that released weights can be loaded by
name.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from transformers import initialization as init

from hf_memmix_kernels.rowwise import gated_norm
from hf_memmix_kernels.short_conv import short_conv, short_conv_step

from .half_lives import decay_rates, softplus_bias

# how a backbone lays out cos and sin: [c, c], every entry twice in a row, or c alone
ROPE_LAYOUTS = ("half", "pairs", "single")
CONV_ACTIVATIONS = (None, "silu")  # of a short convolution
QK_NORMS = (None, "head", "full")


def at_least_fp32(x: Tensor) -> Tensor:
    """x in fp32, or in fp64 if it is."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def has_hooks(module: nn.Module) -> bool:
    """Whether a call of the module does more than its class's forward: hooks, also those of all modules, or a forward
    that offload replaced.
    """
    own = module._forward_pre_hooks or module._forward_hooks or _has_any_global_hook()
    return bool(own) or "forward" in vars(module)


class ShortConvolution(nn.Module):
    """Depthwise causal convolution over the last `taps` tokens; weight [C, 1, taps] and bias [C] as in nn.Conv1d."""

    def __init__(self, channels: int, taps: int, activation: str | None, bias: bool = False):
        super().__init__()
        self.activation = activation
        self.weight = nn.Parameter(torch.empty(channels, 1, taps))
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None

    def forward(
        self,
        x: Tensor,
        state=None,
        lengths=None,
        cu_seqlens=None,
        in_place: bool = False,
        state_indices=None,
        limit: float | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The output [B, T, C] and the state after it. x is clamped to [-limit, limit].

        `in_place` is for one token: it changes `state` itself, or its pages `state_indices` (`MemoryMixer.step`).
        """
        weight = self.weight.squeeze(1)
        if in_place:
            where = {"limit": limit, "state_indices": state_indices}
            return short_conv_step(x, weight, self.bias, state, self.activation, **where), state
        state = None if state is None else state.to(x.dtype)
        return short_conv(
            x, weight, self.bias, activation=self.activation, limit=limit, initial_state=state, lengths=lengths,
            cu_seqlens=cu_seqlens,
        )  # fmt: skip


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, in fp32.

    `average_over_ranks`, the mean of a tensor over the ranks, is set where each rank has a part of the dimension
    (`mixers.tensor_parallel`).
    """

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.eps, self.average_over_ranks = eps, None
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor, gate: Tensor | None = None, activation: str = "silu") -> Tensor:
        """The norm of x, times `activation` ("silu" or "gelu") of `gate`, which has the shape of x."""
        options = {"activation": activation, "average_over_ranks": self.average_over_ranks}
        return gated_norm(x, gate, self.weight, self.eps, **options)


def one_angle_per_pair(x: Tensor, layout: str) -> Tensor:
    """cos or sin [B, T, d] in one of `ROPE_LAYOUTS` -> [B, T, d/2]; "single" has this shape already."""
    if layout == "pairs":
        return x[..., ::2]
    return x if layout == "single" else x[..., : x.shape[-1] // 2]


def init_layers(mixer: nn.Module):
    """N(0, 0.02) matrices and taps, zero biases, unit norms, in all layers of a mixer."""
    for module in mixer.modules():
        if isinstance(module, (nn.Linear, ShortConvolution)):
            init.normal_(module.weight, std=0.02)
            if getattr(module, "bias", None) is not None:
                init.zeros_(module.bias)
        elif isinstance(module, RMSNorm):
            init.ones_(module.weight)


def init_decay(A_log: nn.Parameter, dt_bias: nn.Parameter, half_lives: list | None = None):
    """g = -e^A_log softplus(x + dt_bias) with e^A_log ~ U(0, 16) and softplus(dt_bias) log-uniform in [1e-3, 0.1].

    With the option `half_lives`, e^A_log is 1, and for x = 0 the heads have these half-lives.
    """
    if half_lives is not None:
        init.zeros_(A_log)
        rates = decay_rates(half_lives, len(A_log)).to(dt_bias.device)
        init.copy_(dt_bias, softplus_bias(rates).repeat_interleave(len(dt_bias) // len(A_log)))
        return
    dt = torch.empty_like(dt_bias).uniform_(math.log(1e-3), math.log(0.1)).exp().clamp_min(1e-4)
    init.copy_(A_log, torch.empty_like(A_log).uniform_(0, 16).clamp_min(1e-4).log())
    init.copy_(dt_bias, dt + torch.log(-torch.expm1(-dt)))  # softplus of it is dt
