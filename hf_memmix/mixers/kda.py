"""KDA, Kimi Delta Attention: the gated delta rule with one decay per head and key channel.

    g_t = -e^A softplus(W_f W_e x_t + dt) [H, D];  beta_t = sigmoid(W_b x_t);  q, k of norm 1
    S_t = (I - beta_t k_t k_t^T) Diag(e^g_t) S_{t-1} + beta_t k_t v_t^T;  y_t = D^-1/2 S_t^T q_t
    out = W_o (RMSNorm(y) * sigmoid(W_g W_h x))

The decays and the output gate come from products of two matrices of rank D. Paper: "Kimi Linear: An Expressive,
Efficient Attention Architecture", arXiv:2510.26692. `hf_memmix.conversion.load_delta_layer` takes over weights of
transformers' Kimi Linear.

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
class KDAOptions(DeltaRuleOptions):
    """Options of KDA, see `DeltaRuleOptions`."""


@register_mixer("kda")
class KDAMixer(DeltaRuleMixer):
    """The KDA layer. States: S [B, H, D, D] in fp32, conv_q, conv_k, conv_v [B, C, taps - 1]."""

    summary = (
        "[Kimi Delta Attention](https://arxiv.org/abs/2510.26692): one matrix per head, each of whose key channels"
        " decays by itself; a token replaces what it holds for its key"
    )
    options_class = KDAOptions
    kept_bytes = KeptBytes(6, queries=32, keys=10, heads=8)  # counted from what its op keeps
    decay_layers, gate_layers, gate_activation = ("f_a_proj", "f_b_proj"), ("g_a_proj", "g_b_proj"), "sigmoid"
    steering_layers = ("f_a_proj", "f_b_proj", "b_proj")
    input_layers = (*HeadsMixer.input_layers, "f_a_proj", "b_proj")
    output_layers = ("g_a_proj",)
    head_parameters = ("f_b_proj", "A_log", "dt_bias", "b_proj", "g_b_proj")

    def add_decay(self):
        self.f_a_proj = nn.Linear(self.hidden, self.head_dim, bias=False)
        self.f_b_proj = nn.Linear(self.head_dim, self.heads * self.key_dim, bias=False)
        self.A_log = nn.Parameter(torch.empty(self.heads, dtype=torch.float32))
        self.dt_bias = nn.Parameter(torch.empty(self.heads * self.key_dim, dtype=torch.float32))

    def log_decay(self, products):
        rates = self.A_log.repeat_interleave(self.key_dim)
        return decay(self.f_b_proj(products["f_a_proj"]), self.dt_bias, rates)[1].unflatten(-1, (-1, self.key_dim))

    def add_gate(self):
        self.g_a_proj = nn.Linear(self.hidden, self.head_dim, bias=False)
        self.g_b_proj = nn.Linear(self.head_dim, self.heads * self.head_dim, bias=self.options.gate_bias)

    def readout(self, y, x, tokens=None):
        if self.plain["use_o_norm"]:
            y = self.o_norm(y)
        if self.plain["use_gate"]:
            y = y * self.g_b_proj(self.output_product("g_a_proj", x, tokens)).view(y.shape).sigmoid()
        return self.o_proj(y.flatten(2))
