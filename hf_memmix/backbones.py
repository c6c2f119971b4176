"""The table of decoder families. Everything that the code needs to know about a family of transformers is in its row.

    backbone_of(config).rotates(config, layer_idx)

`BACKBONES` holds one frozen row per family, by `model_type`. A family without a row gets `UNLISTED`, the properties of
most decoders. So mixers can be used in families that are not in the table, but such a family cannot be converted.

Some fields are read only by `hf_memmix.conversion` (layout of the attention tensors, `no_conversion`, `gka_release`).
They are in the same table so that a new family needs only one row.

This module imports neither torch nor transformers.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType


def _every_layer(config, layer_idx: int) -> bool:
    return True


def _listed_layers(config, layer_idx: int) -> bool:
    return bool(config.no_rope_layers[layer_idx])  # in spite of its name, 1 means that the layer rotates


def _sliding_layers(config, layer_idx: int) -> bool:
    return config.layer_types[layer_idx] == "sliding_attention"


def _sliding_layers_or_all(config, layer_idx: int) -> bool:
    return config.sliding_window is None or _sliding_layers(config, layer_idx)


def _sliding_or_first_dense_layers(config, layer_idx: int) -> bool:
    dense = config.mlp_layer_types[layer_idx] == "dense" and config.prefix_dense_sliding_window_pattern == 1
    return dense or _sliding_layers(config, layer_idx)


@dataclass(frozen=True)
class Logits:
    """Steps after the output projection. A field is the name of the config field with the number; None: no such step.

    The order is logits / divisor, * factor, then softcap * tanh(logits / softcap). The config field may be None.
    """

    divisor: str | None = None
    factor: str | None = None
    softcap: str | None = None


@dataclass(frozen=True)
class Backbone:
    """One decoder family.

    Names of modules. The first name that exists is used; a family has one name, `UNLISTED` has several.
        layers: the list of decoder layers, in the base model.
        attention: the attention, in a decoder layer.
        feed_forward: the MLP, in a decoder layer.

    What the model computes:
        rotary: layout of the cos and sin that the layers receive: "half" = [c, c], "pairs" = every entry twice in a
            row, "single" = c alone, None = no rotary embeddings but a learned table of positions.
        interleaved: the rotation pairs the channels (2i, 2i + 1) instead of (i, i + d/2).
        rotates: function of (config, layer_idx): whether the attention of that layer applies the rotary embeddings.
        window: the config may have a `sliding_window`, see `window_of`.
        logits: see `Logits`.
        changes_embeddings: the model multiplies the embeddings, adds to them or normalises them before its first
            layer. A server that divides the layers into stages would do it in each of them.

    Reasons why a family is refused; the text completes "FAMILY is not supported: REASON".
        refused: no mixer can replace the attention.
        no_conversion: a mixer can replace the attention, but cannot be initialised from its weights.
        no_serving: vLLM's Transformers backend cannot run the model. It completes "FAMILY cannot be served by vLLM:
            REASON".

    How the attention module stores its tensors; only the conversion reads this.
        qkv: names of three projections (separate) or of one (fused).
        out: name of the output projection.
        layout: "separate"; "stacked" = one projection with all query rows, then all key rows, then all value rows;
            "per_head" = one projection with q, k, v of head 0, then of head 1, ...
        transposed: weights are `[in, out]` (Conv1D), not `[out, in]` (nn.Linear).
        q_norm, k_norm: names of the norms of q and k, if the model has them.
        norm_offset: number that is added to the weights of these norms (Gemma's 1 + w).
        norm_last: q and k are rotated first and normalised then; mixers do it in the other order.
        extra: names of further tensors, which go to `AttentionWeights.extra`.
        gka_release: the official GKA release has checkpoints of this family.
    """

    layers: tuple[str, ...] = ("layers",)
    attention: tuple[str, ...] = ("self_attn",)
    feed_forward: tuple[str, ...] = ("mlp",)

    rotary: str | None = "half"
    interleaved: bool = False
    rotates: Callable[..., bool] = _every_layer
    window: bool = False
    logits: Logits = Logits()
    changes_embeddings: bool = False

    refused: str | None = None
    no_conversion: str | None = None
    no_serving: str | None = None

    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    out: str = "o_proj"
    layout: str = "separate"
    transposed: bool = False
    q_norm: str = "q_norm"
    k_norm: str = "k_norm"
    norm_offset: float = 0.0
    norm_last: bool = False
    extra: tuple[str, ...] = ()
    gka_release: bool = False


UNLISTED = Backbone(
    layers=("layers", "h"),
    attention=("self_attn", "attention", "attn", "self_attention"),
    feed_forward=("mlp", "feed_forward"),
    window=True,
    logits=Logits("logits_scaling", "logit_scale", "final_logit_softcapping"),
    changes_embeddings=True,  # unknown
)

# what several rows share
_DIVIDED = Logits(divisor="logits_scaling")
_SCALED = Logits(factor="logit_scale")
_CAPPED = Logits(softcap="final_logit_softcapping")
_HUNYUAN = Backbone(q_norm="query_layernorm", k_norm="key_layernorm", norm_last=True)
_NO_LAYOUT = Backbone(refused="its decoder does not pass padding and packing on to its layers")
_SHARED = Backbone(refused="layers use the keys and values of other layers, so these cannot be replaced")
_RECURRENT = Backbone(refused="some of its layers are recurrent already")
_UNKNOWN_NAMES = Backbone(refused="its layers or attention modules have unrecognised names")
_OUTPUT_GATE = "its attention has an output gate that depends on the token"
_UNTESTED = "its conversion has not been tested"
_LATENT = Backbone(
    no_conversion="latent attention: k and v have no projections of x",
    no_serving="vLLM computes its latent attention in a form that the plugin does not know",
)

BACKBONES: Mapping[str, Backbone] = MappingProxyType(
    {
        "apertus": Backbone(),
        "arcee": Backbone(),
        "biogpt": Backbone(out="out_proj", rotary=None, changes_embeddings=True),
        "cohere": Backbone(rotary="pairs", interleaved=True, logits=_SCALED),
        "cohere2": Backbone(rotary="pairs", interleaved=True, rotates=_sliding_layers, window=True, logits=_SCALED),
        "cwm": Backbone(window=True),
        "dots1": Backbone(window=True),
        "ernie4_5": Backbone(interleaved=True),
        "ernie4_5_moe": Backbone(interleaved=True),
        "exaone4": Backbone(rotates=_sliding_layers_or_all, window=True),
        "exaone_moe": Backbone(rotates=_sliding_layers_or_all, window=True),
        "flex_olmo": Backbone(),
        "gemma": Backbone(),
        "gemma2": Backbone(window=True, logits=_CAPPED),
        "gemma3_text": Backbone(norm_offset=1.0, window=True, logits=_CAPPED),
        "glm": Backbone(interleaved=True),
        "glm4": Backbone(interleaved=True),
        "glm4_moe": Backbone(),
        "gpt2": Backbone(
            layers=("h",),
            attention=("attn",),
            rotary=None,
            qkv=("c_attn",),
            out="c_proj",
            layout="stacked",
            transposed=True,
            no_serving="its Transformers backend does not fit the transposed projections of this family",
        ),
        "gpt_neox": Backbone(attention=("attention",), qkv=("query_key_value",), out="dense", layout="per_head"),
        "gpt_oss": Backbone(rotary="single", window=True, extra=("sinks",)),
        "granite": Backbone(logits=_DIVIDED, changes_embeddings=True),
        "granitemoe": Backbone(logits=_DIVIDED, changes_embeddings=True),
        "granitemoeshared": Backbone(logits=_DIVIDED, changes_embeddings=True),
        "helium": Backbone(interleaved=True),
        "hunyuan_v1_dense": _HUNYUAN,
        "hunyuan_v1_moe": _HUNYUAN,
        "jais2": Backbone(),
        "llama": Backbone(gka_release=True),
        "ministral": Backbone(window=True),
        "ministral3": Backbone(window=True),
        "mistral": Backbone(window=True),
        "mixtral": Backbone(window=True),
        "nemotron": Backbone(),
        "olmo": Backbone(),
        "olmo2": Backbone(),
        "olmo3": Backbone(window=True),
        "olmoe": Backbone(),
        "phi": Backbone(out="dense"),
        "phi3": Backbone(window=True, qkv=("qkv_proj",), layout="stacked"),
        "phimoe": Backbone(
            window=True, no_serving="its Transformers backend does not fit the router of this family's experts"
        ),
        "qwen2": Backbone(window=True, gka_release=True),
        "qwen2_moe": Backbone(window=True),
        "qwen3": Backbone(window=True, gka_release=True),
        "qwen3_moe": Backbone(window=True),
        "seed_oss": Backbone(),
        "smollm3": Backbone(rotates=_listed_layers, window=True),
        "solar_open": Backbone(),
        "stablelm": Backbone(),
        "starcoder2": Backbone(window=True),
        "vaultgemma": Backbone(window=True, logits=_CAPPED),
        # no mixer can take the place of their attention
        "bloom": _NO_LAYOUT,
        "codegen": _NO_LAYOUT,
        "gptj": _NO_LAYOUT,
        "gemma3n_text": _SHARED,
        "gemma4_text": _SHARED,
        "gemma4_unified_text": _SHARED,
        "jamba": _RECURRENT,
        "olmo_hybrid": _RECURRENT,
        "qwen3_next": _RECURRENT,
        "llama4_text": Backbone(refused="its rotary embeddings are complex numbers, which no mixer reads"),
        "mpt": _UNKNOWN_NAMES,
        "opt": _UNKNOWN_NAMES,
        # no mixer can take over the weights of their attention
        "deepseek_v2": _LATENT,
        "deepseek_v3": _LATENT,
        "minicpm3": _LATENT,
        "youtu": _LATENT,
        "afmoe": Backbone(rotates=_sliding_layers, window=True, no_conversion=_OUTPUT_GATE, changes_embeddings=True),
        "laguna": Backbone(
            window=True,
            no_conversion=_OUTPUT_GATE,
            no_serving="its Transformers backend does not load the shared experts of this family",
        ),
        "bitnet": Backbone(no_conversion="a norm stands between its attention and the output projection"),
        "cohere2_moe": Backbone(
            rotary="pairs",
            interleaved=True,
            rotates=_sliding_or_first_dense_layers,
            window=True,
            logits=_SCALED,
            no_conversion=_UNTESTED,
        ),
        "diffllama": Backbone(
            no_conversion="its attention is a difference of two softmaxes",
            no_serving="the attention of this family does not use the attention interface of transformers",
        ),
        "doge": Backbone(window=True, no_conversion="its attention mask is computed from the values"),
        "flint": Backbone(rotates=_sliding_layers, window=True, extra=("sinks",), no_conversion=_UNTESTED),
        "kolibri1": Backbone(rotates=_sliding_layers_or_all, window=True, no_conversion=_UNTESTED),
        "nanochat": Backbone(
            logits=_CAPPED,
            changes_embeddings=True,
            no_conversion="its q and k norms have no weights and follow the rotation",
        ),
        "persimmon": Backbone(
            no_conversion="its q and k norms are LayerNorms",
            no_serving="its Transformers backend computes other logits than transformers for this family",
        ),
    }
)

SUGGESTED = ("llama", "qwen3", "gemma3_text")
USE_ANOTHER = f"Use a decoder such as {', '.join(SUGGESTED[:-1])} or {SUGGESTED[-1]}"  # the end of a refusal

# layers that most families have word for word, by family and class name; see `fused_layers.py`
RMS_NORM = ("llama", "LlamaRMSNorm")
GATED_MLP = ("llama", "LlamaMLP")

# entries of `config.layer_types` for layers that are recurrent already
_RECURRENT_LAYERS = {"linear_attention", "conv", "hybrid", "hybrid_sliding"}
# if a class name contains one of these words, generate() makes no default cache or passes it by another name
_RESERVED_WORDS = ("mamba", "rwkv", "minimax", "xlstm", "xlnet", "reformer")


def family_name(config) -> str:
    """The key of a model's family in `BACKBONES`, whether the model is transformers' own or has mixers."""
    return getattr(config, "backbone_model_type", None) or getattr(config, "model_type", "")


def backbone_of(config) -> Backbone:
    """The row of a model's family, or `UNLISTED`. `config`: a configuration of transformers or of a memmix model."""
    return BACKBONES.get(family_name(config), UNLISTED)


def refusal_of(config, class_name: str) -> str | None:
    """Why no mixer can take the place of attention in a causal language model; None if one can.

    The row of the family decides first. Families without a row are judged by the fields of the configuration.

    Args:
        class_name: name of transformers' own model class, e.g. "LlamaForCausalLM".
    """
    row = backbone_of(config)
    if row.refused is not None:
        return row.refused
    if getattr(config, "num_kv_shared_layers", None) or any(getattr(config, "kv_sharing_modes", None) or ()):
        return _SHARED.refused
    if _RECURRENT_LAYERS & set(getattr(config, "layer_types", None) or ()):
        return _RECURRENT.refused
    if getattr(config, "is_causal", True) is False or getattr(config, "use_bidirectional_attention", None):
        return "each token also reads the tokens after it (is_causal or use_bidirectional_attention in its config)"
    if getattr(config, "add_cross_attention", False):
        return "its layers also read the output of an encoder (add_cross_attention in its config)"
    if any(word in class_name.lower() for word in _RESERVED_WORDS):
        return "it has no attention cache of the usual kind"
    return None


def layer_rotates(config, layer_idx: int) -> bool:
    """Whether the backbone's attention uses rotary embeddings in this layer. In some families a few layers do not."""
    return backbone_of(config).rotates(config, layer_idx)


def window_of(config, layer_idx: int) -> int | None:
    """Length of the sliding window of this attention layer, with the current token; None without a window.

    `config.layer_types` lists the layers that have the window. Without this list, all layers have it.
    """
    kinds = getattr(config, "layer_types", None)
    if not backbone_of(config).window or (kinds and kinds[layer_idx] != "sliding_attention"):
        return None
    return getattr(config, "sliding_window", None) or None  # in a few configurations, 0 means no window
