"""Reads the attention weights of any supported decoder family into `AttentionWeights`, which has separate projections.

`extract_attention` finds the tensors by the family's row in `hf_memmix.backbones`. It raises an error for a tensor
that the row does not name, so no tensor is lost silently.
"""

import torch
from torch import Tensor, nn

from hf_memmix import swap
from hf_memmix.backbones import BACKBONES, USE_ANOTHER, Backbone, family_name
from hf_memmix.conversion.attention_weights import AttentionWeights
from hf_memmix.errors import UserError

# reasons by the name of a family that cannot be converted; rows by the name of a family that can
REFUSED: dict[str, str] = {
    name: row.refused or row.no_conversion for name, row in BACKBONES.items() if row.refused or row.no_conversion
}
FAMILIES: dict[str, Backbone] = {name: row for name, row in BACKBONES.items() if name not in REFUSED}


def family_of(config) -> Backbone:
    """The row of a model's family. Raises ValueError for a family that cannot be converted or has no row."""
    name = family_name(config)
    if name in REFUSED:
        raise UserError(f"teacher family {name!r} cannot be converted: {REFUSED[name]}. {USE_ANOTHER}")
    if name not in FAMILIES:
        if (part := family_name(config.get_text_config(decoder=True))) in FAMILIES:
            raise UserError(
                f"teacher family {name!r} has several parts and cannot be converted as a whole; convert its language"
                f" model ({part!r}) alone, see conversion/README.md"
            )
        raise UserError(
            f"teacher family {name!r} is not supported; supported: {', '.join(sorted(FAMILIES))}. "
            "To add one, write its row in hf_memmix/backbones.py"
        )
    return FAMILIES[name]


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """The decoder layers of a causal LM or of its base model."""
    return swap.decoder_layers(model.base_model)


def attention_module(model: nn.Module, layer_idx: int) -> nn.Module:
    """The attention module of one layer, or the mixer that replaces it."""
    return getattr(decoder_layers(model)[layer_idx], swap.attention_name(model.base_model, layer_idx))


def attention_prefix(model: nn.Module, layer_idx: int) -> str:
    """State-dict prefix of that module, without the final dot, e.g. `model.layers.3.self_attn`."""
    base = model.base_model_prefix + "." if model.base_model is not model else ""
    name = swap.attention_name(model.base_model, layer_idx)
    return f"{base}{swap.layers_name(model.base_model)}.{layer_idx}.{name}"


def extract_attention(model: nn.Module, layer_idx: int) -> AttentionWeights:
    """Copies of the attention weights of one layer, without gradients.

    Only parameters are read: no supported family has buffers in its attention modules.

    Raises:
        ValueError: the family is not supported, or a tensor is unknown, missing or of an unexpected size.
    """
    family, config = family_of(model.config), model.config
    module = attention_module(model, layer_idx)
    prefix = attention_prefix(model, layer_idx)
    if (limit := getattr(config, "clip_qkv", None)) is not None:
        raise UserError(
            f"{prefix}: clip_qkv={limit} limits q, k and v, and a mixer would not; keep this layer as attention, or"
            " set clip_qkv to null in config.json and train the student"
        )
    unread = {name: tensor.detach() for name, tensor in module.named_parameters()}

    num_heads = config.num_attention_heads
    num_kv_heads = getattr(config, "num_key_value_heads", None) or num_heads
    head_dim = (
        getattr(module, "head_dim", None) or getattr(config, "head_dim", None) or config.hidden_size // num_heads
    )
    found: dict[str, Tensor | None] = {}
    sources: dict[str, tuple[str, ...]] = {}

    def take(name: str, field_names: tuple[str, ...]) -> Tensor | None:
        tensor = unread.pop(name, None)
        if tensor is not None:
            sources.update(dict.fromkeys(field_names, (f"{prefix}.{name}",)))
            return tensor.mT if family.transposed and tensor.ndim == 2 else tensor
        return None

    for kind in ("weight", "bias"):
        fields = tuple(f"{role}_{kind}" for role in "qkv")
        if family.layout == "separate":
            for name, field_name in zip(family.qkv, fields, strict=True):
                found[field_name] = take(f"{name}.{kind}", (field_name,))
        else:
            fused = take(f"{family.qkv[0]}.{kind}", fields)
            if fused is not None:
                split = _split_fused(fused, family.layout, num_heads, num_kv_heads, head_dim)
                found.update(zip(fields, split, strict=True))
        found[f"o_{kind}"] = take(f"{family.out}.{kind}", (f"o_{kind}",))
    for role, norm in (("q", family.q_norm), ("k", family.k_norm)):
        weight = take(f"{norm}.weight", (f"{role}_norm",))
        if weight is not None and weight.ndim > 1:
            raise UserError(f"{prefix}: {norm} is not an RMSNorm; keep this layer as attention")
        if weight is not None:
            found[f"{role}_norm"] = weight + family.norm_offset if family.norm_offset else weight
    extra = {name: take(name, (f"extra.{name}",)) for name in family.extra if name in unread}

    if unread:
        raise UserError(
            f"{prefix}: tensors {', '.join(sorted(unread))} are not in the table row of {config.model_type!r} and "
            "would be lost; add them to hf_memmix/backbones.py, or keep this layer as attention"
        )
    missing = [name for name in ("q_weight", "k_weight", "v_weight", "o_weight") if found.get(name) is None]
    if missing:
        raise UserError(
            f"{prefix}: found no {', '.join(missing)} under the names in the row of {config.model_type!r}; correct the"
            " row in hf_memmix/backbones.py, or keep this layer as attention"
        )
    for role, heads in (("q", num_heads), ("k", num_kv_heads), ("v", num_kv_heads)):
        rows = found[f"{role}_weight"].shape[0]
        if rows != heads * head_dim:
            raise UserError(f"{prefix}: {role} has {rows} rows; {heads} heads of {head_dim} need {heads * head_dim}")

    if family.interleaved:
        order = _pairs_to_halves(config, head_dim)
        for name in ("q_weight", "q_bias", "q_norm", "k_weight", "k_bias", "k_norm"):
            if found.get(name) is not None:
                found[name] = found[name].unflatten(0, (-1, head_dim))[:, order].flatten(0, 1)

    scaling = getattr(module, "scaling", None)
    if getattr(config, "scale_attn_by_inverse_layer_idx", False):  # all layers of a mixer have one scale
        scaling *= layer_idx + 1
        for name in ("q_weight", "q_bias"):
            found[name] = found[name] / (layer_idx + 1)

    def copy(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.clone(memory_format=torch.contiguous_format)

    return AttentionWeights(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        scaling=scaling,
        softcap=getattr(module, "attn_logit_softcapping", None),
        norm_eps=_eps_of(getattr(module, family.q_norm, None)),
        rotary=family.rotary,
        extra={name: copy(tensor) for name, tensor in extra.items()},
        sources=sources,
        **{name: copy(tensor) for name, tensor in found.items()},
    )


def _eps_of(norm: nn.Module | None) -> float | None:
    for name in ("eps", "variance_epsilon"):
        if hasattr(norm, name):
            return float(getattr(norm, name))
    return None


def _split_fused(
    fused: Tensor, layout: str, heads: int, kv_heads: int, head_dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Split the rows `[out, ...]` of a fused projection, or of its bias, into q, k and v, each ordered by head."""
    if layout == "stacked":
        return fused.split([heads * head_dim, kv_heads * head_dim, kv_heads * head_dim])
    per_head = fused.unflatten(0, (heads, 3, head_dim))
    return tuple(per_head[:, i].flatten(0, 1) for i in range(3))


def _pairs_to_halves(config, head_dim: int) -> Tensor:
    """Order of a head's channels: of the d rotated ones, 2i moves to i and 2i + 1 to i + d/2; the others stay."""
    rotated = int(head_dim * (config.rope_parameters.get("partial_rotary_factor") or 1.0))
    pairs = torch.arange(rotated).view(-1, 2).T.flatten()
    return torch.cat([pairs, torch.arange(rotated, head_dim)])
