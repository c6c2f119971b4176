"""How a window is initialised from a softmax attention: with all its weights. Up to its size, both are the same."""

import torch
from torch import nn

from hf_memmix.conversion.attention_weights import AttentionWeights, TensorFate
from hf_memmix.conversion.from_attention.projections import check_heads, projection_options, take_tensor
from hf_memmix.conversion.from_attention.registry import starts


def options_for(attention: AttentionWeights) -> dict:
    """The options that a window needs to hold all tensors of an attention and to compute the same."""
    options = projection_options(attention)
    if attention.scaling is not None and attention.scaling != attention.head_dim**-0.5:
        options["scale"] = float(attention.scaling)
    if attention.norm_eps is not None:
        options["norm_eps"] = attention.norm_eps
    if attention.softcap is not None:
        options["softcap"] = float(attention.softcap)
    if "sinks" in attention.extra:
        options["sink_logits"] = True
    return options


@starts("window", options=options_for)
@torch.no_grad()
def take_over(mixer: nn.Module, attention: AttentionWeights) -> list[TensorFate]:
    """Fill a `WindowMixer` from an attention, in place; errors as those of `take_projections`."""
    check_heads(mixer, attention)
    fates = []
    for name, tensor in attention.tensors().items():
        if name == "extra.sinks":
            mixer.sink_logits.copy_(tensor)
            fates.append(TensorFate(name, "used", ("sink_logits",)))
        else:
            fates.append(take_tensor(mixer, name, tensor))
    taken = {target for fate in fates for target in fate.targets}
    for name, parameter in mixer.named_parameters():
        if name in ("q_norm.weight", "k_norm.weight") and name not in taken:
            parameter.fill_(_size_of(mixer, name[0]))
        elif name not in taken:
            parameter.zero_()  # a bias that the attention does not have, or the gate, which is 1 then
    return fates


def _size_of(mixer: nn.Module, role: str) -> torch.Tensor:
    """The root mean square of a channel of q or k for inputs of unit variance: the weight of a norm that the attention
    does not have. The scores then have about the size of the attention's, but only the direction of q and k.
    """
    projection = getattr(mixer, f"{role}_proj")
    squares = projection.weight.float().square().sum(1)
    if projection.bias is not None:
        squares = squares + projection.bias.float().square()
    return squares.mean().sqrt()
