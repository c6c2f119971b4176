"""How a GKA layer is initialised from a softmax attention: as close to it as its parameters allow.

q, k, v and o are the attention's, the convolutions return their last token, and the gates do not depend on the token:
y = U (q + (x - q) / 2), with half-lives of the memory log-spaced over the heads. All constants and options are
measured: training/experiments/conversion. A larger beta starts a little closer to the attention, but is worse after
a short alignment.
"""

import math

import torch
from torch import nn

from hf_memmix.conversion.attention_weights import AttentionWeights, TensorFate
from hf_memmix.conversion.from_attention.projections import log_spaced, projection_options, take_projections
from hf_memmix.conversion.from_attention.registry import starts

GATE_BIAS = 0.7388  # silu of it is 0.5
HALF_LIVES = (1.0, 16.0)  # tokens, log-spaced over the heads
LONG_HALF_LIVES = (64.0, 2048.0)  # of a memory with a window beside it, which holds the near past
RIDGE = 0.05  # the paper's is 0.02


def options_for(attention: AttentionWeights) -> dict:
    """The options that a GKA layer needs to hold all tensors of an attention."""
    # signs, positions and output size like those of attention
    own = {"conv_activation": None, "use_o_norm": False, "gate_bias": True, "ridge": RIDGE}
    return own | projection_options(attention)


@starts("gka", options=options_for, lengthen=lambda mixer: start_long(mixer))
@torch.no_grad()
def take_over(mixer: nn.Module, attention: AttentionWeights) -> list[TensorFate]:
    """Fill a `GKAMixer` from an attention, in place; errors and result are those of `take_projections`."""
    fates = take_projections(mixer, attention)
    for name, parameter in mixer.named_parameters():
        if name.endswith("conv1d.weight"):
            parameter.zero_()
            parameter[:, :, -1] = 1
    if mixer.options.use_decay:
        start_decay(mixer)
    for used, name in ((mixer.options.use_alpha, "alpha_proj"), (mixer.options.use_beta, "b_proj")):
        if used:
            getattr(mixer, name).weight.zero_()
            getattr(mixer, name).bias.zero_()  # alpha and beta are one half
    if mixer.options.use_gate and mixer.options.gate_bias:
        mixer.g_proj.weight.zero_()
        mixer.g_proj.bias.fill_(GATE_BIAS)
    return fates


@torch.no_grad()
def start_decay(mixer: nn.Module, half_lives: tuple[float, float] = HALF_LIVES) -> None:
    """Give the heads of a `GKAMixer` constant half-lives in tokens, log-spaced from the first to the second."""
    rate = math.log(2) / log_spaced(half_lives, mixer.heads)
    mixer.a_proj.weight.zero_()
    mixer.A_log.zero_()
    mixer.dt_bias.copy_(torch.log(torch.expm1(rate)))  # softplus of it is the rate


@torch.no_grad()
def start_long(mixer: nn.Module) -> None:
    """Make a `GKAMixer` that was started from attention remember for `LONG_HALF_LIVES`.

    The solution x of the regression is normalised, but U q grows with the number N of tokens that are remembered. So
    the share of the query, 1 - alpha, is 1 / (N + 1).
    """
    if mixer.options.use_decay:
        start_decay(mixer, LONG_HALF_LIVES)
        if mixer.options.use_alpha:
            remembered = 1 / -torch.expm1(-math.log(2) / log_spaced(LONG_HALF_LIVES, mixer.heads))
            mixer.alpha_proj.bias.copy_(remembered.log())
