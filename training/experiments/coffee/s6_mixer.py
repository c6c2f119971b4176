"""S6, the layer of Mamba, in the block of COFFEE, so that only the recurrence differs.

    x_k = e^(A D_k) x_{k-1} + (e^(A D_k) - I) / A B_k u_k,  y_k = C_k x_k,  D, B, C = softplus(W_D u), W_B u, W_C u

Eq. 2 of the COFFEE paper. Shapes: B batch, T tokens, D features, n states.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init

from hf_memmix.mixers.base import MemoryMixer, register_mixer
from hf_memmix.mixers.coffee import CoffeeMixer, CoffeeOptions
from hf_memmix.mixers.layers import at_least_fp32, init_layers
from hf_memmix.mixers.options import mixer_options
from hf_memmix.padding import before_the_end

TIME_STEPS = (1e-3, 0.1)  # D at the start, log-uniform over the features, as in Mamba


def linear_recurrence(kept: Tensor, added: Tensor) -> Tensor:
    """x_k = kept_k x_{k-1} + added_k from x = 0, over dimension 1 of [B, T, ...], in log2(T) parallel rounds."""
    distance = 1
    while distance < kept.shape[1]:
        before, after = slice(None, -distance), slice(distance, None)
        added = torch.cat([added[:, :distance], added[:, after] + kept[:, after] * added[:, before]], 1)
        kept = torch.cat([kept[:, :distance], kept[:, after] * kept[:, before]], 1)
        distance *= 2
    return added


@mixer_options
class S6Options(CoffeeOptions):
    """`CoffeeOptions`; `use_output_filter` is COFFEE's and has no effect."""


@register_mixer("s6")
class S6Mixer(CoffeeMixer):
    """S6 in the block of `CoffeeMixer`. States: x [B, D, n] in fp32 and conv_u [B, D, taps - 1]."""

    options_class = S6Options
    fp32_parameters = ("A_log",)
    step = MemoryMixer.step

    def __init__(self, config, layer_idx: int):
        super().__init__(config, layer_idx)
        states = self.options.states
        self.A_log = nn.Parameter(torch.empty(self.features, states, dtype=torch.float32))
        self.dt_proj = nn.Linear(self.features, self.features)
        self.B_proj = nn.Linear(self.features, states, bias=False)
        self.C_proj = nn.Linear(self.features, states, bias=False)

    def _state_parameters(self):
        return ()

    def scan(self, tokens, states, lengths=None, cu_seqlens=None):
        if cu_seqlens is not None:
            raise ValueError("the s6 mixer of the experiments reads no packed sequences; pad them")
        past = states or {}
        u, conv_u = self.u_conv1d(tokens["u"], past.get("conv_u"), lengths=lengths)
        B, C = at_least_fp32(self.B_proj(u)), at_least_fp32(self.C_proj(u))
        step = F.softplus(at_least_fp32(self.dt_proj(u)))
        if lengths is not None:
            step = step * before_the_end(lengths, u.shape[1])[..., None]
        A = -self.A_log.exp()
        exponent = step[..., None] * A
        kept = exponent.exp()
        added = torch.expm1(exponent) / A * B[:, :, None] * at_least_fp32(u)[..., None]
        if "x" in past:
            added = torch.cat([added[:, :1] + kept[:, :1] * past["x"][:, None], added[:, 1:]], 1)
        x = linear_recurrence(kept, added)
        y = (x * C[:, :, None]).sum(-1).to(u.dtype)
        return y, {"conv_u": conv_u, "x": x[:, -1]}

    def init_weights(self):
        """N(0, 0.02) matrices and taps, A = -(1, ..., n), steps in `TIME_STEPS` by the bias of dt_proj."""
        init_layers(self)
        init.copy_(self.A_log, torch.arange(1.0, self.options.states + 1).log().expand_as(self.A_log))
        low, high = (math.log(step) for step in TIME_STEPS)
        step = torch.empty(self.features).uniform_(low, high).exp()
        init.copy_(self.dt_proj.bias, step + torch.log(-torch.expm1(-step)))  # softplus of it is the step
