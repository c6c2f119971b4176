"""Loads models from folders. Where transformers would fill a tensor at random, ignore it or misread it, this module
raises an error of one line.
"""

import pickle
import re
from pathlib import Path

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import (
    ROPE_INIT_FUNCTIONS,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    Mxfp4Config,
    PreTrainedConfig,
    PreTrainedModel,
)

from hf_memmix._transformers import (
    ACT2FN,
    load_generation_config,
    loaded_in_fp32,
    model_class_of,
)
from hf_memmix.conversion.model_files import (
    ORIGINAL,
    check_model_folder,
    check_other_files,
    check_sizes,
    first_names,
    quantization_of,
    read_json,
)
from hf_memmix.errors import UserError
from hf_memmix.quantization import QUANTIZERS
from hf_memmix.swap import names_matching

SAFETENSORS, PICKLED = "model.safetensors", "pytorch_model.bin"
# tensors in old checkpoints that no model needs: masks and rotary angles, which are computed today
UNUSED_TENSORS = re.compile(r"\.attn\.(masked_)?bias$|rotary_emb\.inv_freq$|(^|\.)position_ids$")
ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function")
HALVES = ("F16", "BF16")
FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def read_config(folder: str | Path) -> PreTrainedConfig:
    """The configuration of a causal LM in a local folder.

    Raises:
        ValueError: there is no configuration, it is not a causal LM's, it has impossible values, another file is
            broken, or the weights are quantized.
    """
    folder = Path(folder)
    raw = check_model_folder(folder)
    if (method := quantization_of(raw)) and method not in QUANTIZERS:  # of a student, which can be run
        raise UserError(f"{str(folder)!r} holds weights quantized by {method!r}; {ORIGINAL}")
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    # the library raises exceptions of many kinds for impossible values
    except (StrictDataclassError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError) as error:
        raise UserError(f"{str(folder)!r} has a config.json with impossible values: {one_line(error)}") from None
    if model_class_of(type(config)) is None and config.get_text_config(decoder=True) is not config:
        part = config.get_text_config(decoder=True).model_type
        raise UserError(
            f"{str(folder)!r} holds a {config.model_type!r} model of several parts, which is not converted as a whole;"
            f" give a folder with a language model alone (here it is {part!r}) of a family in conversion/README.md"
        )
    if model_class_of(type(config)) is None:
        raise UserError(
            f"{str(folder)!r} holds a {config.model_type!r} model, which is not a causal language model; give a"
            " decoder"
        )
    check_sizes(folder, lambda name: getattr(config, name, None))
    _check_functions(folder, config)
    return config


def meta_teacher(folder: str | Path) -> PreTrainedModel:
    """The model in a folder on "meta": shapes, the dtypes that `load_model` gives, generation settings, no weights.

    The folder needs only a config.json. Raises ValueError if config.json is missing.
    """
    folder = Path(folder)
    config = read_config(folder)
    dtype = config.dtype or _stored_dtype(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name in names_matching(model.state_dict().keys() & tensors.keys(), loaded_in_fp32(model, dtype)):
        tensors[name].data = tensors[name].data.float()
    load_generation_config(model, folder)
    return model.eval()


@torch.inference_mode(False)  # tensors that are made in it could never be trained
def load_model(folder: str | Path, dtype="auto", **placement) -> PreTrainedModel:
    """A causal LM from a local folder, native or converted, in eval mode.

    Args:
        dtype: dtype of the weights, e.g. torch.float32; "auto" is the stored dtype.
        placement: `device_map` and `offload_folder` of `from_pretrained`. Weights on the disk are not checked for NaN.

    Raises:
        ValueError: the folder holds no causal LM; its weights are corrupt, truncated or quantized; names or shapes of
            its tensors differ from the model's; or a weight is NaN or infinite.
    """
    folder = Path(folder)
    config = read_config(folder)
    quantized = getattr(config, "quantization_config", None)
    ours = config.model_type.startswith("memmix")
    pickled = check_weight_files(folder, packed=bool(quantized) and ours)
    # wrong shapes are ignored here, because `check_loading` refuses them with the name of the tensor
    options = {"dtype": dtype, "output_loading_info": True, "ignore_mismatched_sizes": True, **placement}
    if quantized and not ours:  # `read_config` has accepted it, so it is mxfp4
        options["quantization_config"] = Mxfp4Config(dequantize=True)
    try:
        model, loading = AutoModelForCausalLM.from_pretrained(folder, **options)
    except SafetensorError as error:
        raise UserError(f"{str(folder)!r} has corrupt or truncated weights ({error}); copy it again") from error
    except (pickle.UnpicklingError, EOFError, RuntimeError) as error:
        if not pickled:
            raise
        raise UserError(
            f"{str(folder / PICKLED)!r} is damaged, or holds Python objects other than tensors, which are not loaded"
            " for safety; save the model as safetensors"
        ) from error
    name = repr(str(folder))
    check_loading(name, loading)
    check_ties(model, name)
    check_finite_weights(model, name)
    return model.eval()


def load_tokenizer(folder: Path):
    """The tokenizer in a folder; None if there is none. Raises ValueError if it cannot be read."""
    check_other_files(folder)
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "vocab.json")):
        return None
    try:
        return AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # the tokenizers library raises plain exceptions
        raise UserError(f"{folder} has a tokenizer that cannot be read ({error}); copy it again") from None


def check_loading(name: str, loading: dict) -> None:
    """Raise ValueError unless checkpoint and model have the same tensors; `loading`: transformers' loading info."""
    if different := sorted(loading["mismatched_keys"]):
        key, stored, wanted = different[0]
        raise UserError(
            f"{name} has {len(different)} tensors whose shape is not the one that its config.json requires: {key} is"
            f" {list(stored)}, not {list(wanted)}. Restore the config.json that belongs to the weights"
        )
    if missing := sorted(loading["missing_keys"]):
        raise UserError(
            f"{name} lacks {len(missing)} tensors: {first_names(missing)}. They would be random; copy the folder again"
        )
    if unexpected := sorted(key for key in loading["unexpected_keys"] if not UNUSED_TENSORS.search(key)):
        raise UserError(
            f"{name} has {len(unexpected)} tensors that a model of its config.json does not have:"
            f" {first_names(unexpected)}. They would be lost. Restore the config.json that belongs to the weights, or"
            " remove these tensors"
        )
    if errors := loading.get("error_msgs"):
        raise UserError(f"{name} cannot be loaded: {one_line(errors[0])}")


def check_ties(model: PreTrainedModel, name: str) -> None:
    """Raise ValueError if config.json ties the output projection to the embeddings, but their values differ.

    A saved copy of the model would lose one of the two.
    """
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    if not model.config.tie_word_embeddings or head is None or head.weight.is_meta:
        return
    if head.weight is not embeddings.weight and not torch.equal(head.weight, embeddings.weight):
        refuse_untied_head(name)


def refuse_untied_head(name: str):
    """Raise the error of `check_ties`."""
    raise UserError(
        f"{name} has an output projection that differs from the embeddings, but its config.json ties the two; set"
        " tie_word_embeddings to false"
    )


@torch.no_grad()
def check_finite_weights(model: nn.Module, name: str) -> None:
    """Raise ValueError with the names of the tensors if weights are NaN or infinite. Skips tensors on meta."""
    if bad := [key for key, tensor in model.state_dict().items() if not _is_finite(tensor)]:
        _refuse_values(name, f"{len(bad)} tensors: {first_names(bad)}")


@torch.no_grad()
def check_finite_tensor(tensor: torch.Tensor, key: str, name: str) -> None:
    """As `check_finite_weights`, for one tensor `key` or a part of it."""
    if not _is_finite(tensor):
        _refuse_values(name, f"1 tensors: {key}")


def _refuse_values(name: str, where: str):
    raise UserError(
        f"{name} has NaN or infinite values in {where}. The copy is damaged or its training diverged; give another"
        " checkpoint"
    )


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that hold a model's weights; an empty list if there are no such files.

    Raises:
        ValueError: the index of a sharded model is broken or names a file that is not there.
    """
    index = folder / f"{SAFETENSORS}.index.json"
    if (folder / SAFETENSORS).is_file():  # transformers also ignores an index in this case
        return [folder / SAFETENSORS]
    if not index.is_file():
        return []
    files = read_json(index).get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
        raise UserError(f"{str(index)!r} has no weight_map of tensors and files; copy it again")
    files = sorted(set(files.values()))
    if missing := [file for file in files if not (folder / file).is_file()]:
        raise UserError(f"{str(folder)!r} lacks the weight files {first_names(missing)}; copy the folder again")
    return [folder / file for file in files]


def one_line(error: Exception | str) -> str:
    """The text of an error without line breaks. The kind of a KeyError or ArithmeticError is added."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__} {text}" if isinstance(error, (KeyError, ArithmeticError)) else text


def check_weight_files(folder: Path, packed: bool = False) -> bool:
    """Whether the weights are a pickle. Raises ValueError for missing, truncated, mixed or quantized weight files.

    packed: quantized ones are right.
    """
    files, halves = weight_files(folder), {}
    if not files:
        if any((folder / name).is_file() for name in (PICKLED, f"{PICKLED}.index.json")):
            return True
        if shards := sorted(file.name for file in folder.glob("model-*-of-*.safetensors")):
            raise UserError(
                f"{str(folder)!r} has {len(shards)} weight files such as {shards[0]}, but no {SAFETENSORS}.index.json,"
                " which names the tensors of each; copy it too"
            )
        raise UserError(f"{str(folder)!r} has a config.json but no weights; there is no {SAFETENSORS}")
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                kinds = {key: opened.get_slice(key).get_dtype() for key in opened.keys()}  # noqa: SIM118, no dict
        except SafetensorError as error:
            raise UserError(
                f"{str(folder)!r} has corrupt or truncated weights ({file.name}: {error}); copy it again"
            ) from error
        found = sorted(key for key, kind in kinds.items() if key.endswith("weight") and kind not in FLOATS)
        if found and not packed:
            raise UserError(
                f"{str(file)!r} holds {len(found)} weights of the type {kinds[found[0]]}: {first_names(found)}."
                f" They look quantized; {ORIGINAL}"
            )
        halves |= {kind: key for key, kind in kinds.items() if kind in HALVES}
    if len(halves) > 1:
        mixed = ", ".join(f"{key} is {kind}" for kind, key in sorted(halves.items()))
        raise UserError(
            f"{str(folder)!r} mixes files of two models, one in bf16 and one in fp16 ({mixed}); copy the folder again"
        )
    return False


def _check_functions(folder: Path, config: PreTrainedConfig) -> None:
    """Raise ValueError if transformers does not have the activation or the type of rotary embeddings."""
    named = [(name, getattr(config, name, None), ACT2FN) for name in ACTIVATIONS]
    rope_types = _rope_types(getattr(config, "rope_parameters", None))
    named += [("rope_type", kind, {"default": None, **ROPE_INIT_FUNCTIONS}) for kind in rope_types]
    for name, value, known in named:
        if isinstance(value, str) and value not in known:
            raise UserError(
                f"{str(folder)!r} has {name} {value!r} in config.json; transformers has {', '.join(sorted(known))}"
            )


def _rope_types(parameters) -> list:
    """The types in a config's `rope_parameters`, which may hold one dictionary per layer type."""
    if not isinstance(parameters, dict):
        return []
    if "rope_type" in parameters or "type" in parameters:
        return [parameters.get("rope_type", parameters.get("type"))]
    return [kind for part in parameters.values() for kind in _rope_types(part)]


def _stored_dtype(folder: Path) -> torch.dtype:
    """The dtype that transformers takes for a config.json without one: that of the first stored tensor of floats."""
    for file in weight_files(folder)[:1]:
        with safe_open(file, framework="pt") as opened:
            for key in opened.keys():  # noqa: SIM118, no dict
                if (kind := opened.get_slice(key).get_dtype()) in FLOATS:
                    return FLOATS[kind]
    return torch.float32


def _is_finite(tensor: torch.Tensor) -> bool:
    if tensor.is_meta or not tensor.is_floating_point() or not tensor.numel():
        return True
    if type(tensor) not in (torch.Tensor, nn.Parameter):  # quantised: integers and scales
        tensor = tensor.dequantize()
    return all(bound.isfinite() for bound in torch.aminmax(tensor))  # NaN makes both NaN; needs no copy of the tensor
