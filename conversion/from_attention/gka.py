"""How a GKA layer is initialised from a softmax attention: as close to it as its parameters allow.

q, k, v and o are the attention's, the convolutions return their last token, and the gates do not depend on the token:
y = U (q + N / (N + 1) (x - q)) in a head that remembers N tokens, with half-lives log-spaced over the heads. Constants
and options are measured: training/experiments/conversion and smollm2. A larger beta starts a little closer to the
attention, but is worse after a short alignment.
"""

import torch
from torch import nn

from hf_memmix.conversion.attention_weights import AttentionWeights, TensorFate
from hf_memmix.conversion.from_attention.half_lives import (
    inverse_silu,
    share_of_heads,
    start_decay,
    start_half_lives,
)
from hf_memmix.conversion.from_attention.projections import pass_convolutions, projection_options, take_projections
from hf_memmix.conversion.from_attention.registry import starts
from hf_memmix.mixers.half_lives import decay_rates

GATE = 0.5
HALF_LIVES = (1.0, 16.0)  # tokens, log-spaced over the heads
RIDGE = 0.05  # the paper's is 0.02


def options_for(attention: AttentionWeights) -> dict:
    """The options that a GKA layer needs to hold all tensors of an attention."""
    # signs, positions and output size like those of attention
    own = {"conv_activation": None, "use_o_norm": False, "gate_bias": True, "ridge": RIDGE}
    return own | projection_options(attention)


@starts("gka", options=options_for)
@torch.no_grad()
def take_over(mixer: nn.Module, attention: AttentionWeights) -> list[TensorFate]:
    """Fill a `GKAMixer` from an attention, in place; errors and result are those of `take_projections`."""
    fates = take_projections(mixer, attention)
    pass_convolutions(mixer)
    for used, name in ((mixer.options.use_alpha, "alpha_proj"), (mixer.options.use_beta, "b_proj")):
        if used:
            getattr(mixer, name).weight.zero_()
            getattr(mixer, name).bias.zero_()  # beta is one half, and alpha where nothing is forgotten
    gate = torch.full((mixer.heads,), GATE)
    if mixer.options.use_decay:
        half_lives = start_half_lives(mixer, HALF_LIVES)
        start_decay(mixer, half_lives, mixer.a_proj)
        gate = gate * share_of_heads(mixer, HALF_LIVES)
        if mixer.options.use_alpha:
            # the solution x is normalised, but U q grows with the number N of tokens that are remembered
            remembered = 1 / -torch.expm1(-decay_rates(half_lives, mixer.heads))
            mixer.alpha_proj.bias.copy_(remembered.log())
    if mixer.options.use_gate and mixer.options.gate_bias:
        mixer.g_proj.weight.zero_()
        mixer.g_proj.bias.copy_(inverse_silu(gate).repeat_interleave(mixer.head_dim))
    return fates
