"""How each decoder family of transformers stores its attention, and the way from there to plain projections.

`FAMILIES` is all this package knows about families: one row says how q, k, v and o lie in the tensors of an attention
module. `extract_attention` reads a row and returns `AttentionWeights`; a tensor that no column of the row names is an
error, never a silent loss.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hf_memmix import swap
from hf_memmix.conversion.attention_weights import AttentionWeights


@dataclass(frozen=True)
class Family:
    """One row: attribute names below the attention module, and the layout of the fused projection if there is one.

    `qkv`: three projections (separate) or one (fused). `layout` of a fused one: "stacked" = all query rows, then all
    key rows, then all value rows (Phi-3, GPT-2); "per_head" = q, k, v of head 0, then of head 1, ... (GPT-NeoX).
    `rotary`: see `AttentionWeights`; `interleaved`: the family rotates channels (2i, 2i + 1) together.
    `transposed`: weights are `[in, out]` (GPT-2's Conv1D). `norm_offset`: added to q/k norm weights (Gemma's 1 + w).
    `norm_last`: q and k are rotated and then normalised; mixers do it in the usual order.
    `extra`: tensors without a counterpart in `AttentionWeights`, passed on by name.
    """

    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    out: str = "o_proj"
    layout: str = "separate"
    transposed: bool = False
    q_norm: str = "q_norm"
    k_norm: str = "k_norm"
    norm_offset: float = 0.0
    norm_last: bool = False
    rotary: str | None = "half"
    interleaved: bool = False
    extra: tuple[str, ...] = ()


PLAIN = Family()  # separate projections, each with or without a bias, q/k norms where the family has them

FAMILIES: dict[str, Family] = {
    **dict.fromkeys(
        (
            "apertus",
            "arcee",
            "cwm",
            "dots1",
            "exaone4",
            "exaone_moe",
            "flex_olmo",
            "gemma",
            "gemma2",
            "glm4_moe",
            "granite",
            "granitemoe",
            "granitemoeshared",
            "jais2",
            "llama",
            "ministral",
            "ministral3",
            "mistral",
            "mixtral",
            "nemotron",
            "olmo",
            "olmo2",
            "olmo3",
            "olmoe",
            "phimoe",
            "qwen2",
            "qwen2_moe",
            "qwen3",
            "qwen3_moe",
            "seed_oss",
            "smollm3",
            "solar_open",
            "stablelm",
            "starcoder2",
            "vaultgemma",
        ),
        PLAIN,
    ),
    **dict.fromkeys(("cohere", "cohere2"), Family(rotary="pairs", interleaved=True)),
    **dict.fromkeys(("ernie4_5", "ernie4_5_moe", "glm", "glm4", "helium"), Family(interleaved=True)),
    "biogpt": Family(out="out_proj", rotary=None),
    "gemma3_text": Family(norm_offset=1.0),
    "gpt2": Family(
        qkv=("c_attn",),
        out="c_proj",
        layout="stacked",
        transposed=True,
        rotary=None,
    ),
    "gpt_neox": Family(qkv=("query_key_value",), out="dense", layout="per_head"),
    "gpt_oss": Family(extra=("sinks",), rotary="single"),
    **dict.fromkeys(
        ("hunyuan_v1_dense", "hunyuan_v1_moe"),
        Family(q_norm="query_layernorm", k_norm="key_layernorm", norm_last=True),
    ),
    "phi": Family(out="dense"),
    "phi3": Family(qkv=("qkv_proj",), layout="stacked"),
}

# families that no row can describe, and why
REFUSED: dict[str, str] = {
    **dict.fromkeys(("bloom", "codegen", "gptj"), "its decoder tells its layers neither padding nor packing"),
    **dict.fromkeys(
        ("deepseek_v2", "deepseek_v3", "minicpm3", "youtu"), "latent attention: k and v have no projections of x"
    ),
    **dict.fromkeys(("afmoe", "laguna"), "its attention has an output gate that depends on the token"),
    **dict.fromkeys(("gemma3n_text", "gemma4_text"), "its layers share keys and values"),
    **dict.fromkeys(("jamba", "olmo_hybrid", "qwen3_next"), "some of its layers are recurrent already"),
    **dict.fromkeys(("mpt", "opt"), "its layers or their attention lie under names that the swap does not know"),
    "bitnet": "a norm stands between its attention and the output projection",
    "diffllama": "its attention is a difference of two softmaxes",
    "doge": "its attention mask is computed from the values",
    "nanochat": "its q and k norms have no weights and follow the rotation",
    "persimmon": "its q and k norms are LayerNorms",
}


def family_of(config) -> Family:
    """The row of a backbone config's `model_type`. Raises ValueError for a family that is not in the table."""
    model_type = getattr(config, "backbone_model_type", None) or config.model_type
    if model_type in REFUSED:
        raise ValueError(
            f"teacher family {model_type!r} cannot be converted: {REFUSED[model_type]}. Use a decoder such as llama, "
            "qwen3 or gemma3_text"
        )
    if model_type not in FAMILIES:
        raise ValueError(
            f"teacher family {model_type!r} is not supported; supported: {', '.join(sorted(FAMILIES))}. "
            "To add one, write its row in conversion/families.py"
        )
    return FAMILIES[model_type]


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """The decoder layers of a causal LM or of its base model."""
    return swap.decoder_layers(model.base_model)


def attention_module(model: nn.Module, layer_idx: int) -> nn.Module:
    """The attention module (or the mixer that took its place) of one layer."""
    layer = decoder_layers(model)[layer_idx]
    return getattr(layer, swap.attention_name(layer))


def attention_prefix(model: nn.Module, layer_idx: int) -> str:
    """State-dict prefix of that module, without the final dot, e.g. `model.layers.3.self_attn`."""
    base = model.base_model_prefix + "." if model.base_model is not model else ""
    name = swap.attention_name(decoder_layers(model)[layer_idx])
    return f"{base}{swap.layers_name(model.base_model)}.{layer_idx}.{name}"


def extract_attention(model: nn.Module, layer_idx: int) -> AttentionWeights:
    """Plain weights of the attention of one layer, as detached copies. Raises ValueError on any tensor not understood.

    Parameters only: the families of the table keep no buffers in their attention modules.
    """
    family, config = family_of(model.config), model.config
    module = attention_module(model, layer_idx)
    prefix = attention_prefix(model, layer_idx)
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
            raise ValueError(f"{prefix}: {norm} is not an RMSNorm; keep this layer as attention")
        if weight is not None:
            found[f"{role}_norm"] = weight + family.norm_offset if family.norm_offset else weight
    extra = {name: take(name, (f"extra.{name}",)) for name in family.extra if name in unread}

    if unread:
        raise ValueError(
            f"{prefix}: tensors {', '.join(sorted(unread))} are not in the table row of {config.model_type!r} and "
            "would be lost; add them to conversion/families.py, or keep this layer as attention"
        )
    missing = [name for name in ("q_weight", "k_weight", "v_weight", "o_weight") if found.get(name) is None]
    if missing:
        raise ValueError(f"{prefix}: no {', '.join(missing)} where the row of {config.model_type!r} expects it")
    for role, heads in (("q", num_heads), ("k", num_kv_heads), ("v", num_kv_heads)):
        rows = found[f"{role}_weight"].shape[0]
        if rows != heads * head_dim:
            raise ValueError(f"{prefix}: {role} has {rows} rows; {heads} heads of {head_dim} need {heads * head_dim}")

    if family.interleaved:
        order = _pairs_to_halves(config, head_dim)
        for name in ("q_weight", "q_bias", "q_norm", "k_weight", "k_bias", "k_norm"):
            if found.get(name) is not None:
                found[name] = found[name].unflatten(0, (-1, head_dim))[:, order].flatten(0, 1)

    def copy(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.clone(memory_format=torch.contiguous_format)

    return AttentionWeights(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        scaling=getattr(module, "scaling", None),
        rotary=family.rotary,
        extra={name: copy(tensor) for name, tensor in extra.items()},
        sources=sources,
        **{name: copy(tensor) for name, tensor in found.items()},
    )


def _split_fused(
    fused: Tensor, layout: str, heads: int, kv_heads: int, head_dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows `[out, ...]` of a fused projection (or its bias) -> q, k, v, head by head."""
    if layout == "stacked":
        return fused.split([heads * head_dim, kv_heads * head_dim, kv_heads * head_dim])
    per_head = fused.unflatten(0, (heads, 3, head_dim))
    return tuple(per_head[:, i].flatten(0, 1) for i in range(3))


def _pairs_to_halves(config, head_dim: int) -> Tensor:
    """Order of a head's channels that puts channel 2i at i and 2i + 1 at i + d/2, for the d rotated ones."""
    rotated = int(head_dim * (config.rope_parameters.get("partial_rotary_factor") or 1.0))
    pairs = torch.arange(rotated).view(-1, 2).T.flatten()
    return torch.cat([pairs, torch.arange(rotated, head_dim)])
