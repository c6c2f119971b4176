"""What most starts share: the projections and norms of the attention are copied into the mixer unchanged.

This is for mixers with `heads`, `kv_heads`, `head_dim`, linear layers `q_proj`, `k_proj`, `v_proj`, `o_proj` and, by
option, `q_norm`, `k_norm`. A start fills the other parameters (gates, convolutions) itself.
"""

import torch
from torch import Tensor, nn

from hf_memmix.conversion.attention_weights import AttentionWeights, TensorFate
from hf_memmix.errors import UserError


def projection_options(attention: AttentionWeights) -> dict:
    """The options `use_rope`, `rope_layout`, `qkv_bias`, `o_bias` and `qk_norm` under which nothing is lost."""
    options = {}
    if attention.rotary is not None:
        options |= {"use_rope": True, "rope_layout": attention.rotary}
    if attention.q_bias is not None:
        options["qkv_bias"] = True
    if attention.o_bias is not None:
        options["o_bias"] = True
    if attention.q_norm is not None:
        options["qk_norm"] = _kind_of_norm(attention.q_norm, attention.head_dim)
    return options


def check_heads(mixer: nn.Module, attention: AttentionWeights) -> None:
    """Raise ValueError if mixer and attention differ in the number of heads or in their size."""
    shape = (attention.num_heads, attention.num_kv_heads, attention.head_dim)
    own = (mixer.heads, mixer.kv_heads, mixer.head_dim)
    if shape != own:
        raise UserError(
            f"layer {mixer.layer_idx}: attention has (heads, kv heads, head size) {shape}, the mixer {own}; they must"
            " be equal"
        )


@torch.no_grad()
def take_projections(mixer: nn.Module, attention: AttentionWeights) -> list[TensorFate]:
    """Copy projections and norms into a mixer, in place; one fate for each of the attention's tensors.

    If the mixer has a bias and the attention does not, the bias becomes zero.

    Raises:
        ValueError: the sizes differ, or the mixer's options give it no parameter for a tensor.
    """
    check_heads(mixer, attention)
    fates = [take_tensor(mixer, name, tensor) for name, tensor in attention.tensors().items()]
    taken = {target for fate in fates for target in fate.targets}
    for name, parameter in mixer.named_parameters():
        if name not in taken and name.split(".")[0] in ("q_proj", "k_proj", "v_proj", "o_proj"):
            parameter.zero_()
    return fates


@torch.no_grad()
def pass_convolutions(mixer: nn.Module) -> None:
    """Let every short convolution give its input unchanged."""
    for name, parameter in mixer.named_parameters():
        if name.endswith("conv1d.weight"):
            parameter.zero_()
            parameter[:, :, -1] = 1


FOLDED = "the norm's scale is multiplied into the projection; its division by the rms has no counterpart"


def with_norm_scale(attention: AttentionWeights, role: str, tensor: Tensor) -> Tensor:
    """Rows of `q_weight`, `q_bias`, ... times the scale of the norm that follows, for mixers without this norm."""
    scale = getattr(attention, f"{role}_norm", None)
    if scale is None:
        return tensor
    scale = scale.repeat(tensor.shape[0] // scale.numel())
    if tensor.is_cpu:
        scale = scale.cpu()  # before its dtype changes: `tensor` may be here because the model's device has no float64
    return tensor * scale.to(tensor.dtype).view(-1, *[1] * (tensor.ndim - 1))


def _kind_of_norm(weight: Tensor, head_dim: int) -> str:
    return "head" if weight.numel() == head_dim else "full"


def take_tensor(mixer: nn.Module, field: str, tensor: Tensor) -> TensorFate:
    """Copy one tensor, a field of `AttentionWeights.tensors()`, to its place in the mixer."""
    if field == "extra.sinks":
        reason = f"attention sinks are logits of a softmax, which {mixer.name} does not have"
        return TensorFate(field, "dropped", reason=reason)
    role, _, kind = field.partition("_")
    if role not in ("q", "k", "v", "o") or kind not in ("weight", "bias", "norm"):
        raise UserError(f"the attention's {field} has no place in a {mixer.name} layer; keep this layer as attention")
    target = f"{field}.weight" if kind == "norm" else f"{role}_proj.{kind}"
    parameter = dict(mixer.named_parameters()).get(target)
    if parameter is None:
        bias = "o_bias=True" if role == "o" else "qkv_bias=True"
        option = bias if kind == "bias" else f"qk_norm={_kind_of_norm(tensor, mixer.head_dim)!r}"
        raise UserError(
            f"layer {mixer.layer_idx}: the attention's {field} would be lost; convert with the option {option}"
        )
    if parameter.shape != tensor.shape:
        raise UserError(
            f"layer {mixer.layer_idx}: {field} has shape {tuple(tensor.shape)}, {target} needs"
            f" {tuple(parameter.shape)}"
        )
    parameter.copy_(tensor)
    return TensorFate(field, "used", (target,))
