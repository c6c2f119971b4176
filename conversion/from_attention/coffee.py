"""How a COFFEE layer is initialised from a softmax attention: as averages of the past over several time scales.

v and o are the attention's: u is v, head by head, and the output is read through o. q and k cannot be used, because a
COFFEE state decides by itself what it takes in, and there are no scores of pairs of tokens. They are reported as
dropped. The convolution returns its last token, and the feedback starts at zero. So every gate is one half, and the
states of a feature are averages of its past, weighted by e^(-age / tau) with tau log-spaced over the states; C reads
their mean. The constants are measured: training/experiments/conversion. Time scales from 4 tokens on start even closer
to the attention, but are worse after a short alignment.
"""

import math

import torch
from torch import nn

from hf_memmix.conversion.attention_weights import AttentionWeights, TensorFate
from hf_memmix.conversion.from_attention.half_lives import start_half_lives
from hf_memmix.conversion.from_attention.registry import starts
from hf_memmix.errors import UserError
from hf_memmix.mixers.half_lives import decay_rates

GATE_BIAS = 1.0204  # silu of it is 0.75
HALF_LIVES = (2 * math.log(2), 64 * math.log(2))  # tokens, log-spaced over the states: time scales of 2 to 64
NO_SCORES = "scores of queries and keys have no counterpart: a COFFEE state gates itself"


def options_for(attention: AttentionWeights) -> dict:
    """The options that a COFFEE layer needs to hold an attention's values and output projection."""
    return {
        "inner_size": attention.num_heads * attention.head_dim,
        "conv_activation": None,
        "use_o_norm": False,
        "gate_bias": True,
        "u_bias": attention.v_bias is not None,
        "o_bias": attention.o_bias is not None,
    }


@starts("coffee", options=options_for)
@torch.no_grad()
def take_over(mixer: nn.Module, attention: AttentionWeights) -> list[TensorFate]:
    """Fill a `CoffeeMixer` from an attention, in place; one fate for each of the attention's tensors.

    Raises:
        ValueError: the mixer has another number of features, or its options give it no parameter for a bias.
    """
    features = attention.num_heads * attention.head_dim
    if mixer.features != features:
        raise UserError(
            f"layer {mixer.layer_idx}: the attention's heads have {features} channels in all, the mixer has"
            f" {mixer.features} features; convert with inner_size={features}"
        )
    fates = [_take(mixer, attention, field, tensor) for field, tensor in attention.tensors().items()]
    for name, found in (("u_proj", attention.v_bias), ("o_proj", attention.o_bias)):
        if found is None and getattr(mixer, name).bias is not None:
            getattr(mixer, name).bias.zero_()
    mixer.u_conv1d.weight.zero_()
    mixer.u_conv1d.weight[:, :, -1] = 1
    start_states(mixer)
    if mixer.options.use_gate and mixer.options.gate_bias:
        mixer.z_proj.weight.zero_()
        mixer.z_proj.bias.fill_(GATE_BIAS)
    return fates


@torch.no_grad()
def start_states(mixer: nn.Module) -> None:
    """Make a `CoffeeMixer`'s states averages of the past over log-spaced half-lives, and C their mean."""
    n = mixer.options.states
    lam = 2 * torch.expm1(-decay_rates(start_half_lives(mixer, HALF_LIVES), n))
    mixer.lam_logit.copy_(torch.logit(-lam / 2))
    mixer.w.zero_()
    mixer.C.copy_(-lam / n)  # the state's limit for a constant u is -u / lambda
    if mixer.options.use_output_filter:
        mixer.w_filter.zero_()
        mixer.C.mul_(2)  # the filter starts at one half


def _take(mixer: nn.Module, attention: AttentionWeights, field: str, tensor: torch.Tensor) -> TensorFate:
    role, _, kind = field.partition("_")
    if role in ("q", "k") or field == "extra.sinks":
        return TensorFate(field, "dropped", reason=NO_SCORES)
    if role not in ("v", "o") or kind not in ("weight", "bias"):
        raise UserError(f"the attention's {field} has no place in a coffee layer; keep this layer as attention")
    target = f"{'u' if role == 'v' else 'o'}_proj.{kind}"
    parameter = dict(mixer.named_parameters()).get(target)
    if parameter is None:
        option = "u_bias" if role == "v" else "o_bias"
        raise UserError(
            f"layer {mixer.layer_idx}: the attention's {field} would be lost; convert with the option {option}=True"
        )
    group = attention.num_heads // attention.num_kv_heads
    if role == "o" or group == 1:
        parameter.copy_(tensor)
        return TensorFate(field, "used", (target,))
    heads = tensor.unflatten(0, (attention.num_kv_heads, attention.head_dim))
    parameter.copy_(heads.repeat_interleave(group, 0).flatten(0, 1))
    reason = f"each value head repeated for the {group} query heads that share it"
    return TensorFate(field, "transformed", (target,), reason)
