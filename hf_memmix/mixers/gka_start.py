"""Where a GKA layer starts that takes over a softmax attention: as close to it as its parameters allow.

q, k, v and o are the attention's, the convolutions pass their last token on, and the gates are constants, whatever the
token: y = U (q + (x - q) / 2) with half-lives of the memory spread over the heads. All constants and options are
measured: conversion/results/gka_init.json.
"""

import math

import torch
from torch import nn

from .attention_start import projection_options, take_projections
from .attention_weights import AttentionWeights, TensorFate

LOGIT = 0.0  # of alpha and beta: both start at one half
GATE_BIAS = 0.485  # silu of it is 0.3
HALF_LIVES = (1.0, 64.0)  # tokens, log-spaced over the heads


def options_for(attention: AttentionWeights) -> dict:
    """Options with which a GKA layer has a place for all of an attention."""
    # signs, positions and output size as attention has them halve the error after a short alignment
    return {"conv_activation": None, "use_o_norm": False, "gate_bias": True} | projection_options(attention)


@torch.no_grad()
def take_over(mixer: nn.Module, attention: AttentionWeights) -> list[TensorFate]:
    """Fill a `GKAMixer` from an attention, in place; errors and result are those of `take_projections`."""
    fates = take_projections(mixer, attention)
    for name, parameter in mixer.named_parameters():
        if name.endswith("conv1d.weight"):
            parameter.zero_()
            parameter[:, :, -1] = 1
    _start_gates(mixer)
    return fates


def _start_gates(mixer: nn.Module):
    options = mixer.options
    if options.use_decay:
        low, high = (math.log(x) for x in HALF_LIVES)
        rate = math.log(2) / torch.linspace(low, high, mixer.heads).exp()
        mixer.a_proj.weight.zero_()
        mixer.A_log.zero_()
        mixer.dt_bias.copy_(torch.log(torch.expm1(rate)))  # softplus of it is the rate
    for used, name in ((options.use_alpha, "alpha_proj"), (options.use_beta, "b_proj")):
        if used:
            projection = getattr(mixer, name)
            projection.weight.zero_()
            projection.bias.fill_(LOGIT)
    if options.use_gate and options.gate_bias:
        mixer.g_proj.weight.zero_()
        mixer.g_proj.bias.fill_(GATE_BIAS)
