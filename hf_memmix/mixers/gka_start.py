"""Where a GKA layer starts that takes over a softmax attention: as close to it as its parameters allow.

q, k, v and o are the attention's, the convolutions pass their last token on, and the gates are constants, whatever the
token: y = U (q + (x - q) / 2) with half-lives of the memory spread over the heads. All constants and options are
measured: conversion/results/gka_init.json.
"""

import math

import torch
from torch import Tensor, nn

from .attention_weights import AttentionWeights, TensorFate

LOGIT = 0.0  # of alpha and beta: both start at one half
GATE_BIAS = 0.485  # silu of it is 0.3
HALF_LIVES = (1.0, 64.0)  # tokens, log-spaced over the heads


def options_for(attention: AttentionWeights) -> dict:
    """Options with which a GKA layer has a place for all of an attention."""
    # signs, positions and output size as attention has them halve the error after a short alignment
    options = {"conv_activation": None, "use_o_norm": False, "gate_bias": True}
    if attention.rotary is not None:
        options |= {"use_rope": True, "rope_layout": attention.rotary}
    if attention.q_bias is not None:
        options["qkv_bias"] = True
    if attention.o_bias is not None:
        options["o_bias"] = True
    if attention.q_norm is not None:
        options["qk_norm"] = _kind_of_norm(attention.q_norm, attention.head_dim)
    return options


@torch.no_grad()
def take_over(mixer: nn.Module, attention: AttentionWeights) -> list[TensorFate]:
    """Fill a `GKAMixer` from an attention, in place; one fate for each of its tensors.

    Raises:
        ValueError: the sizes differ, or a tensor has no place under the mixer's options.
    """
    shape = (attention.num_heads, attention.num_kv_heads, attention.head_dim)
    own = (mixer.heads, mixer.kv_heads, mixer.head_dim)
    if shape != own:
        raise ValueError(
            f"layer {mixer.layer_idx}: attention has (heads, kv heads, head size) {shape}, the mixer {own}; they must"
            " be equal"
        )
    fates = [_take(mixer, name, tensor) for name, tensor in attention.tensors().items()]
    # a projection without a bias in the attention, where the options make one: neutral
    taken = {target for fate in fates for target in fate.targets}
    for name, parameter in mixer.named_parameters():
        if name not in taken and name.split(".")[0] in ("q_proj", "k_proj", "v_proj", "o_proj"):
            parameter.zero_()
    for name, parameter in mixer.named_parameters():
        if name.endswith("conv1d.weight"):
            parameter.zero_()
            parameter[:, :, -1] = 1
    _start_gates(mixer)
    return fates


def _kind_of_norm(weight: Tensor, head_dim: int) -> str:
    return "head" if weight.numel() == head_dim else "full"


def _take(mixer: nn.Module, field: str, tensor: Tensor) -> TensorFate:
    """Copy one tensor, a field of `AttentionWeights.tensors()`, to its place in the mixer."""
    if field == "extra.sinks":
        return TensorFate(field, "dropped", reason="attention sinks are logits of a softmax, which GKA does not have")
    role, _, kind = field.partition("_")
    if role not in ("q", "k", "v", "o") or kind not in ("weight", "bias", "norm"):
        raise ValueError(f"the attention's {field} has no place in a GKA layer; keep this layer as attention")
    target = f"{field}.weight" if kind == "norm" else f"{role}_proj.{kind}"
    parameter = dict(mixer.named_parameters()).get(target)
    if parameter is None:
        bias = "o_bias=True" if role == "o" else "qkv_bias=True"
        option = bias if kind == "bias" else f"qk_norm={_kind_of_norm(tensor, mixer.head_dim)!r}"
        raise ValueError(
            f"layer {mixer.layer_idx}: the attention's {field} would be lost; convert with the option {option}"
        )
    if parameter.shape != tensor.shape:
        raise ValueError(
            f"layer {mixer.layer_idx}: {field} has shape {tuple(tensor.shape)}, {target} needs"
            f" {tuple(parameter.shape)}"
        )
    parameter.copy_(tensor)
    return TensorFate(field, "used", (target,))


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
