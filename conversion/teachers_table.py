"""The tables of conversion/README.md, read from `backbones.py` and from transformers' own default configurations.

python -m hf_memmix.conversion.teachers_table    # prints it
python -m hf_memmix.training.experiments.figures       # puts it in place
"""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hf_memmix.backbones import BACKBONES, SUGGESTED, Backbone, layer_rotates
from hf_memmix.conversion.attention_weights import AttentionWeights
from hf_memmix.conversion.families import FAMILIES, extract_attention
from hf_memmix.conversion.from_attention import STARTS
from hf_memmix.conversion.records import markdown_table
from hf_memmix.mixers import MIXERS

HEAD = ("teachers", "projections", "biases", "q and k norm", "heads of k and v", "positions", "not carried over")
LAYOUTS = {"separate": "q, k, v", "stacked": "fused: all q, k, v rows", "per_head": "fused, head by head"}
BIAS_OPTIONS = ("attention_bias", "use_bias", "use_qkv_bias")
NORM_OPTIONS = ("use_qk_norm", "qk_layernorm")


def teachers_table() -> str:
    """Markdown: one row for all families with equal properties, and which mixers use rotary embeddings."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for model_type in sorted(FAMILIES):
        rows.setdefault(traits(model_type), []).append(f"`{model_type}`")
    table = markdown_table(HEAD, [(", ".join(names), *row) for row, names in rows.items()])
    return "\n\n".join([f"{len(FAMILIES)} families:", table, positions_of_mixers()])


def refusals() -> str:
    """Markdown: the families that are refused, grouped by the reason."""
    swap = {name: row.refused for name, row in BACKBONES.items() if row.refused}
    conversion = {name: row.no_conversion for name, row in BACKBONES.items() if row.no_conversion}
    return "\n\n".join(
        [
            "No mixer can take the place of the attention of these families. `memmix_config` refuses them too:",
            by_reason(swap),
            "These can have mixers in a model that is trained from scratch, but no pretrained model of theirs can be"
            " converted:",
            by_reason(conversion),
        ]
    )


def by_reason(refused: dict[str, str]) -> str:
    """Markdown: a line for each reason with its families."""
    reasons: dict[str, list[str]] = {}
    for name, reason in refused.items():
        reasons.setdefault(reason, []).append(f"`{name}`")
    return "\n".join(f"- {', '.join(names)}: {reason}." for reason, names in reasons.items())


def traits(model_type: str) -> tuple[str, ...]:
    """All columns except the first one, for the default configuration of a family."""
    family, (config, attention) = FAMILIES[model_type], _default(model_type)
    layout = LAYOUTS[family.layout] + (", Conv1D" if family.transposed else "")
    kv_heads = "grouped" if "num_key_value_heads" in config.to_dict() else "as many as of q"
    biases, norms = _biases(config, attention), _norms(model_type)
    return layout, biases, norms, kv_heads, _positions(family, config), _lost(family, config)


def positions_of_mixers() -> str:
    """A sentence: which mixers apply the teacher's rotary embeddings to q and k, and which do not."""
    attention = _default(SUGGESTED[0])[1]
    # without mixers that a user has registered
    own = {name: m for name, m in MIXERS.items() if m.__module__.startswith("hf_memmix.mixers.")}
    able = {name: STARTS[name] for name in own if name in STARTS}
    keep = [name for name, start in able.items() if start.options(attention).get("use_rope")]
    drop = [name for name in able if name not in keep]
    names = [", ".join(f"`{name}`" for name in part) for part in (keep, drop)]
    return (
        f"{names[0]} keep the rotary embeddings; {names[1]} do not use them, because their states depend on the order"
        " of the tokens."
    )


def _default(model_type: str, **options) -> tuple[AutoConfig, AttentionWeights]:
    """Default configuration of a family, and the attention of a model of these sizes on the meta device."""
    config, shallow = (AutoConfig.for_model(model_type, **options) for _ in range(2))
    with torch.device("meta"):
        return config, extract_attention(AutoModelForCausalLM.from_config(_shallow(shallow)), 1)


def _shallow(config):
    """Reduce a configuration to two layers, which is enough here, and without experts if these are dense."""
    for name in ("layer_types", "mlp_layer_types", "no_rope_layers"):
        if getattr(config, name, None):
            setattr(config, name, getattr(config, name)[:2])
    if hasattr(config, "first_k_dense_replace"):
        config.first_k_dense_replace = 2
    if getattr(config, "head_dim", 0) is None:
        config.head_dim = config.hidden_size // config.num_attention_heads
    if getattr(config, "num_key_value_heads", 0) is None:
        config.num_key_value_heads = config.num_attention_heads
    config.num_hidden_layers = 2
    return config


def _biases(config, attention: AttentionWeights) -> str:
    present = [role for role in "qkvo" if getattr(attention, f"{role}_bias") is not None]
    by_config = any(name in config.to_dict() for name in BIAS_OPTIONS)
    return (", ".join(present) or "none") + ("; by config" if by_config else "")


def _norms(model_type: str) -> str:
    config, attention = _default(model_type)
    options = [name for name in NORM_OPTIONS if name in config.to_dict()]
    if not options:
        return _norm(attention)
    try:
        return f"{_norm(attention)}; by config {_norm(_default(model_type, **{options[0]: True})[1])}"
    except ValueError:
        return f"{_norm(attention)}; `{options[0]}` refused: a LayerNorm"


def _norm(attention: AttentionWeights) -> str:
    if attention.q_norm is None:
        return "none"
    return "of a head" if attention.q_norm.numel() == attention.head_dim else "of all heads"


def _positions(family: Backbone, config) -> str:
    if family.rotary is None:
        return "learned"
    part = (config.rope_parameters or {}).get("partial_rotary_factor") or 1.0
    rotary = "rotary, neighbours paired" if family.interleaved else "rotary, halves paired"
    rotary += f", {part:.0%} of a head" if part < 1 else ""
    everywhere = all(layer_rotates(config, i) for i in range(config.num_hidden_layers))
    return rotary + ("" if everywhere else ", not in all layers")


def _lost(family: Backbone, config) -> str:
    fields = config.to_dict()
    lost = {
        "soft-cap of scores": "attn_logit_softcapping" in fields,
        "window": family.window,
        "clipping": "clip_qkv" in fields,
        "norm after rotation": family.norm_last,
    }
    return ", ".join([text for text, is_lost in lost.items() if is_lost] + list(family.extra))


if __name__ == "__main__":
    print(teachers_table(), refusals(), sep="\n\n")
