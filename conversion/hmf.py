"""Checkpoints of the official GKA release (awslabs/hybrid-model-factory, "HMF") as models of this package.

    model = import_hmf("primed-qwen3-8b-gka");  save_student(model, "imported")

A GKA layer of the release computes the same as a `GKAMixer` with default options and one phase of Chebyshev
iterations. Its parameters have the same names, but lie below `layers.i.gka` instead of `layers.i.self_attn`. The
release's own package needs older versions of transformers and a GPU, and supports neither padding nor a forward of
several tokens with a filled cache.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

import hf_memmix
from hf_memmix._transformers import model_class_of
from hf_memmix.conversion.loading import check_finite_weights, first_names, read_json, weight_files
from hf_memmix.conversion.model_files import check_released
from hf_memmix.errors import UserError
from hf_memmix.mixers import ATTENTION

LAYER_KINDS = {"*": ATTENTION, "full_attention": ATTENTION, "GKA": "gka"}
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "merges.txt", "added_tokens.json",
    "special_tokens_map.json", "chat_template.jinja",
)  # fmt: skip
# defaults in the constructor of the release's layer, for fields that are missing in config.json
GKA_DEFAULTS = {
    "use_beta_gate": True,
    "use_alpha_connection": True,
    "use_v_conv": True,
    "use_forgetting_gate": True,
    "use_forgetting_gate_kk": True,
    "gla_rescale": True,
    "solver_type": "chebyshev",
    "num_iter": 30,
    "ridge_strength": 0.02,
    "use_gate": True,
    "conv_size": 4,
    "norm_eps": 1e-6,
    "chunk_size": 64,
    "kv_proj_rank": None,
}
_SIZES = {
    "hidden_size": "hidden_size",
    "head_dim": "head_dim",
    "num_q_heads": "num_attention_heads",
    "num_k_heads": "num_key_value_heads",
    "num_v_heads": "num_key_value_heads",
}
# used in training only; used with kv_proj_rank only; not used
_IGNORED = ("bp_lambda", "kv_learnable_residual", "layer_idx")
_OWN_KEYS = ("model_type", "hybrid_override_pattern", "layer_types", "gka_config", "architectures", "auto_map")
_UNUSED_DECAY = ("a_proj.weight", "A_log", "dt_bias")


@dataclass
class ImportReport:
    """`layers`: "attention" or "gka" for each layer; `copied`: number of copied tensors; `dropped`: name ("source")
    and "reason" of every other tensor.
    """

    backbone: str
    layers: list[str]
    copied: int = 0
    dropped: list[dict] = field(default_factory=list)

    def record(self) -> dict:
        return asdict(self)


@torch.inference_mode(False)  # as in `load_model`
def import_hmf(folder: str | Path) -> PreTrainedModel:
    """The model of a folder in the release's format, in eval mode and the stored dtype, with `conversion_report`.

    Raises:
        ValueError: a file is missing or broken, a layer is neither attention nor GKA, a setting has no counterpart,
            or tensors are missing, unknown, of another shape or not finite.
    """
    folder = Path(folder)
    raw = _read_config(folder)
    config = hmf_config(raw)
    report = ImportReport(config.backbone_model_type, list(config.mixer_types))
    with torch.device("meta"):
        own = AutoModelForCausalLM.from_config(config).state_dict()
    ours = {_release_name(name, config.mixer_types): name for name in own}
    found = dict(_tensors(folder))
    _drop_unused(found, config, report)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    _check_names(folder, {name: own[ours[name]].shape for name in ours.keys() - tied}, found)
    report.copied = len(found)
    state = {ours[name]: tensor for name, tensor in found.items()}
    dtype = state["model.embed_tokens.weight"].dtype
    model_class = model_class_of(type(config))
    model = model_class.from_pretrained(None, config=config, state_dict=state, dtype=dtype)
    check_finite_weights(model, repr(str(folder)))
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    model.conversion_report = report
    return model.eval()


def hmf_config(raw: dict) -> hf_memmix.MemMixConfig:
    """Our configuration from the contents of the release's config.json.

    Raises:
        ValueError: a setting has no counterpart here.
    """
    check_released(raw)
    backbone = raw["model_type"].removeprefix("hybrid_")
    # config.json also has settings of mixers that no layer uses
    other = {name for name, value in raw.items() if name.endswith("_config") and isinstance(value, dict)}
    fields = {name: value for name, value in raw.items() if name not in other and name not in _OWN_KEYS}
    config = AutoConfig.for_model(backbone, **fields)
    types = _layer_kinds(raw, config.num_hidden_layers)
    return hf_memmix.memmix_config(config, types, {"gka": _gka_options(raw["gka_config"], config)})


def tokenizer_files(folder: Path) -> dict[str, bytes]:
    """Contents of the tokenizer's files by name. AutoTokenizer may fail to load them because of the model's config."""
    return {name: (folder / name).read_bytes() for name in TOKENIZER_FILES if (folder / name).is_file()}


def _read_config(folder: Path) -> dict:
    file = folder / "config.json"
    if not file.is_file():
        raise UserError(f"{str(folder)!r} is not a model folder: it has no config.json")
    return read_json(file)


def _layer_kinds(raw: dict, layers: int) -> list[str]:
    """One entry per layer, from `hybrid_override_pattern` "*-GKA-..." or from `layer_types` ["*", "GKA", ...]."""
    pattern = raw.get("hybrid_override_pattern") or raw.get("layer_types") or []
    kinds = pattern.split("-") if isinstance(pattern, str) else list(pattern)
    for i, kind in enumerate(kinds):
        if kind not in LAYER_KINDS:
            remedy = "unfuse the checkpoint with the release's prime-unfuse" if "GKA" in str(kind) else "none is known"
            raise UserError(
                f"layer {i} is of the kind {kind!r}; only attention ('*') and GKA layers can be imported. Remedy: "
                f"{remedy}"
            )
    if len(kinds) != layers:
        raise UserError(f"the layer pattern has {len(kinds)} entries, num_hidden_layers is {layers}; they must agree")
    return [LAYER_KINDS[kind] for kind in kinds]


def _gka_options(given: dict, config) -> dict:
    """The options of `GKAMixer` for the release's settings.

    With `gla_rescale` the release divides the output by sqrt(D) before its norm, as `GKAMixer` always does. Without
    it, a smaller epsilon of the norm gives the same result.
    """
    known = {*GKA_DEFAULTS, *_SIZES, *_IGNORED}
    if unknown := sorted(set(given) - known):
        raise UserError(f"gka_config has unknown settings {unknown}; known: {sorted(known)}")
    settings = GKA_DEFAULTS | given
    sizes = {name: getattr(config, own) for name, own in _SIZES.items()}
    wrong = [
        f"{name}={given[name]} (the model has {size})" for name, size in sizes.items() if given.get(name, size) != size
    ]
    if wrong:
        raise UserError(f"gka_config has {', '.join(wrong)}; a GKA layer here has the sizes of the attention")
    if settings["solver_type"] != "chebyshev":
        raise UserError(f"solver_type={settings['solver_type']!r} is unknown; the release supports 'chebyshev'")
    if settings["kv_proj_rank"] is not None:
        raise UserError(f"kv_proj_rank={settings['kv_proj_rank']} (learned key/value heads) is not supported")
    if settings["use_forgetting_gate"] and not settings["use_forgetting_gate_kk"]:
        raise UserError(
            "use_forgetting_gate_kk=False with use_forgetting_gate=True (H never forgets) is not supported"
        )
    scale = 1 if settings["gla_rescale"] else sizes["head_dim"]
    return {
        "solver_phases": [settings["num_iter"]],
        "ridge": settings["ridge_strength"],
        "chunk_size": settings["chunk_size"],
        "use_decay": settings["use_forgetting_gate"],
        "use_beta": settings["use_beta_gate"],
        "use_alpha": settings["use_alpha_connection"],
        "use_gate": settings["use_gate"],
        "use_v_conv": settings["use_v_conv"],
        "conv_size": settings["conv_size"],
        "norm_eps": settings["norm_eps"] / scale,
    }


def _tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Name and tensor of everything in the folder's safetensors files."""
    if not (files := weight_files(folder)):
        raise UserError(f"{str(folder)!r} lacks the weight files model.safetensors; copy it again")
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                for key in opened.keys():  # noqa: SIM118, safe_open is no dict
                    yield key, opened.get_tensor(key)
        except SafetensorError as error:
            raise UserError(f"{str(file)!r} is corrupt or truncated ({error}); copy it again") from error


def _release_name(name: str, kinds: list[str]) -> str:
    """The release's name of one of our tensors: GKA parameters are below `gka` instead of `self_attn`."""
    head, _, rest = name.partition("model.layers.")
    layer = rest.partition(".")[0]
    in_gka = not head and layer.isdigit() and kinds[int(layer)] == "gka"
    return name.replace(".self_attn.", ".gka.", 1) if in_gka else name


def _drop_unused(found: dict[str, Tensor], config, report: ImportReport) -> None:
    """Remove from `found` the tensors that the release stores but does not use, and list them in the report."""
    for name in list(found):
        if not config.mixers["gka"]["use_decay"] and name.partition(".gka.")[2] in _UNUSED_DECAY:
            reason = "the release stores a forget gate even if use_forgetting_gate is false, but does not use it"
        elif name == "lm_head.weight" and config.tie_word_embeddings:
            if not torch.equal(found[name], found.get("model.embed_tokens.weight", found[name])):
                raise UserError("lm_head.weight differs from the embeddings; set tie_word_embeddings to false")
            reason = "equal to the embeddings; config.json ties the two (tie_word_embeddings)"
        else:
            continue
        del found[name]
        report.dropped.append({"source": name, "reason": reason})


def _check_names(folder: Path, expected: dict[str, torch.Size], found: dict[str, Tensor]) -> None:
    """Raise ValueError unless `found` holds exactly the tensors of `expected`."""
    if missing := expected.keys() - found.keys():
        raise UserError(
            f"{str(folder)!r} lacks {len(missing)} tensors: {first_names(sorted(missing))}; copy the folder again"
        )
    if unknown := found.keys() - expected.keys():
        raise UserError(
            f"{str(folder)!r} has {len(unknown)} tensors that the model does not have: {first_names(sorted(unknown))};"
            " they would be lost. A fused checkpoint must be unfused with the release's prime-unfuse first"
        )
    for name, shape in sorted(expected.items()):
        if found[name].shape != shape:
            raise UserError(
                f"{name} has shape {list(found[name].shape)}, but config.json requires {list(shape)}; restore the"
                " config.json that belongs to the weights"
            )
