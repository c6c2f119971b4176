"""How a Mamba-2 layer is initialised from a softmax attention: as linear attention with decay.

C is the attention's query, B its key, x its value, head by head, as in Wang et al., "The Mamba in the Llama"
(arXiv:2408.15237); the scale of a norm of q or k is multiplied into the rows. The convolution returns its last token,
D = 0, the gate and the time step do not depend on the token, and the half-lives of the memory are log-spaced over the
heads. The gated norm gives outputs of size 1, attention those of its values; the scale of the norm is `VALUE_SHARE` of
the size that a value has for an input of size 1.
"""

import torch
from torch import nn

from hf_memmix.conversion.attention_weights import AttentionWeights, TensorFate
from hf_memmix.conversion.from_attention.half_lives import start_half_lives
from hf_memmix.conversion.from_attention.projections import FOLDED, with_norm_scale
from hf_memmix.conversion.from_attention.registry import starts
from hf_memmix.errors import UserError

GATE_BIAS = 1.2785  # silu of it is 1
HALF_LIVES = (1.0, 64.0)  # tokens, log-spaced over the heads
# measured: training/experiments/smollm2
VALUE_SHARE = 0.025
_ROLES = {"v": "x, its values", "k": "B, its keys", "q": "C, its queries"}


def options_for(attention: AttentionWeights) -> dict:
    """The options that a Mamba-2 layer needs to hold an attention's projections."""
    return {
        "state_size": attention.head_dim,
        "head_dim": attention.head_dim,
        "expand": attention.num_heads * attention.head_dim / attention.q_weight.shape[1],
        "n_groups": attention.num_heads,
        "use_bias": True,
    }


@starts("mamba2", options=options_for)
@torch.no_grad()
def take_over(mixer: nn.Module, attention: AttentionWeights) -> list[TensorFate]:
    """Fill a `Mamba2Mixer` from an attention, in place; one fate for each of the attention's tensors.

    Raises:
        ValueError: the mixer's heads and states are not those of `options_for`.
    """
    D, heads = attention.head_dim, attention.num_heads
    wanted = options_for(attention)
    found = {name: getattr(mixer.options, name) for name in wanted}
    if any(found[name] != value for name, value in wanted.items() if name != "expand") or mixer.features != D * heads:
        raise UserError(
            f"layer {mixer.layer_idx}: the attention's {heads} heads of size {D} need the options {wanted}, the mixer"
            f" has {found}"
        )
    for parameter in (mixer.in_proj.weight, mixer.in_proj.bias, mixer.out_proj.bias, mixer.D, mixer.conv1d.weight):
        parameter.zero_()
    if mixer.conv1d.bias is not None:
        mixer.conv1d.bias.zero_()
    mixer.conv1d.weight[:, :, -1] = 1
    mixer.norm.weight.copy_(VALUE_SHARE * _value_sizes(attention))
    size = mixer.features
    mixer.in_proj.bias[:size] = GATE_BIAS
    fates = [_take(mixer, attention, field, tensor) for field, tensor in attention.tensors().items()]
    for parameter, value in zip(
        (mixer.A_log, mixer.dt_bias), mixer.decay_of(start_half_lives(mixer, HALF_LIVES)), strict=True
    ):
        parameter.copy_(value)
    return fates


def _value_sizes(attention: AttentionWeights) -> torch.Tensor:
    """Root mean square [heads * head_dim] of each channel of the values, for inputs of independent unit channels."""
    squares = attention.v_weight.float().square().sum(1)
    if attention.v_bias is not None:
        squares = squares + attention.v_bias.float().square()
    heads = squares.sqrt().unflatten(0, (-1, attention.head_dim))
    return heads.repeat_interleave(attention.num_heads // heads.shape[0], 0).flatten()


def _take(mixer: nn.Module, attention: AttentionWeights, field: str, tensor: torch.Tensor) -> TensorFate:
    if field == "extra.sinks":
        return TensorFate(
            field, "dropped", reason="attention sinks are logits of a softmax, which mamba2 does not have"
        )
    role, _, kind = field.partition("_")
    if role not in ("q", "k", "v", "o") or kind not in ("weight", "bias", "norm"):
        raise UserError(f"the attention's {field} has no place in a mamba2 layer; keep this layer as attention")
    if role == "o":
        getattr(mixer.out_proj, kind).copy_(tensor)
        return TensorFate(field, "used", (f"out_proj.{kind}",))
    rows = slice(*((1 + "vkq".index(role) + i) * mixer.features for i in (0, 1)))
    target = "in_proj.bias" if kind == "bias" else "in_proj.weight"
    if kind == "norm":
        return TensorFate(field, "transformed", (target,), FOLDED)
    heads = with_norm_scale(attention, role, tensor).unflatten(0, (-1, attention.head_dim))
    heads = heads.repeat_interleave(attention.num_heads // heads.shape[0], 0)
    dict(mixer.named_parameters())[target][rows] = heads.flatten(0, 1)
    return TensorFate(field, "transformed", (target,), f"rows of {_ROLES[role]}, one head for each query head")
