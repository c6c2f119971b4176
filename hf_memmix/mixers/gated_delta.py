"""Gated DeltaNet: a memory that decays, and in which a token replaces what is held for its key by its value.

    g_t = -e^A softplus(W_a x_t + dt);  beta_t = sigmoid(W_b x_t);  q, k of norm 1
    S_t = (I - beta_t k_t k_t^T) e^g_t S_{t-1} + beta_t k_t v_t^T;  y_t = D^-1/2 S_t^T q_t
    out = W_o (RMSNorm(y) * silu(W_g x))

Paper: Yang et al., "Gated Delta Networks: Improving Mamba2 with Delta Rule", arXiv:2412.06464. Qwen3-Next has these
layers; `hf_memmix.conversion.load_delta_layer` takes their weights over.

Shapes: B batch, T tokens, H heads, D head size.
"""

import torch
from torch import nn

from hf_memmix_kernels.rowwise import decay

from .base import register_mixer
from .delta_rule import DeltaRuleMixer, DeltaRuleOptions
from .heads import HeadsMixer
from .kept_bytes import KeptBytes
from .options import mixer_options


@mixer_options
class GatedDeltaOptions(DeltaRuleOptions):
    """Options of Gated DeltaNet, see `DeltaRuleOptions`."""


@register_mixer("gated_delta")
class GatedDeltaMixer(DeltaRuleMixer):
    """The layer of Gated DeltaNet. States: S [B, H, D, D] in fp32, conv_q, conv_k, conv_v [B, C, taps - 1]."""

    summary = (
        "[Gated DeltaNet](https://arxiv.org/abs/2412.06464): one matrix per head, which decays; a token replaces what"
        " it holds for its key"
    )
    options_class = GatedDeltaOptions
    kept_bytes = KeptBytes(6, queries=18, keys=10, heads=14)  # counted from what its op keeps
    decay_layers = ("a_proj",)
    steering_layers = ("a_proj", "b_proj")
    input_layers = (*HeadsMixer.input_layers, "a_proj", "b_proj")
    head_parameters = ("a_proj", "A_log", "dt_bias", "b_proj")

    def add_decay(self):
        self.a_proj = nn.Linear(self.hidden, self.heads, bias=False)
        self.A_log = nn.Parameter(torch.empty(self.heads, dtype=torch.float32))
        self.dt_bias = nn.Parameter(torch.empty(self.heads, dtype=torch.float32))

    def log_decay(self, products):
        return decay(products["a_proj"], self.dt_bias, self.A_log)[1]
