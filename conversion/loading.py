"""Models from folders: whatever transformers would fill at random, leave out or misread is refused in one line."""

import json
import pickle
import re
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, Mxfp4Config, PreTrainedConfig, PreTrainedModel

from hf_memmix._transformers import ACT2FN, ROPE_INIT_FUNCTIONS, model_class_of

SAFETENSORS, PICKLED = "model.safetensors", "pytorch_model.bin"
# what old checkpoints store and no model reads: masks and angles that are computed today
UNUSED_TENSORS = re.compile(r"\.attn\.(masked_)?bias$|rotary_emb\.inv_freq$|(^|\.)position_ids$")
SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function")
DEQUANTIZED = ("mxfp4",)  # by transformers, while loading: the form in which gpt_oss is released
FLOATS = ("F64", "F32", "F16", "BF16")


def read_config(folder: str | Path) -> PreTrainedConfig:
    """The configuration of a causal LM in a local folder.

    Raises:
        ValueError: there is none, it is not a causal LM's, it has impossible values, or its weights are quantized.
    """
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise ValueError(f"{str(folder)!r} is not a model folder: it has no config.json")
    raw = read_json(folder / "config.json")
    if method := _quantization(raw):
        raise ValueError(
            f"{str(folder)!r} holds weights quantized by {method!r}; give the original weights in bf16, fp16 or fp32"
        )
    _check_sizes(folder, raw.get)
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    # the library answers impossible values with whatever its code meets first
    except (StrictDataclassError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError) as error:
        raise ValueError(f"{str(folder)!r} has a config.json with impossible values: {one_line(error)}") from None
    if model_class_of(type(config)) is None:
        raise ValueError(
            f"{str(folder)!r} holds a {config.model_type!r} model, which is no causal language model; give a decoder"
        )
    _check_sizes(folder, lambda name: getattr(config, name, None))
    _check_functions(folder, config)
    return config


def load_model(folder: str | Path, dtype="auto") -> PreTrainedModel:
    """A causal LM from a local folder, native or converted, in eval mode.

    Args:
        dtype: of the weights, e.g. torch.float32; "auto": as stored.

    Raises:
        ValueError: there is none; its weights are corrupt, truncated or quantized; its tensors and the model's do not
            correspond, one for one and in shape; a weight is NaN or infinite.
    """
    folder = Path(folder)
    config = read_config(folder)
    pickled = _check_files(folder)
    # another shape is refused below, by name
    options = {"dtype": dtype, "output_loading_info": True, "ignore_mismatched_sizes": True}
    if getattr(config, "quantization_config", None):  # one that `read_config` lets pass
        options["quantization_config"] = Mxfp4Config(dequantize=True)
    try:
        model, loading = AutoModelForCausalLM.from_pretrained(folder, **options)
    except SafetensorError as error:
        raise ValueError(f"{str(folder)!r} has corrupt or truncated weights ({error}); copy it anew") from error
    except (pickle.UnpicklingError, EOFError, RuntimeError) as error:
        if not pickled:
            raise
        raise ValueError(
            f"{str(folder / PICKLED)!r} is damaged, or holds more than tensors, which is not run; save the model as"
            " safetensors"
        ) from error
    name = repr(str(folder))
    check_loading(name, loading)
    check_ties(model, name)
    check_finite_weights(model, name)
    return model.eval()


def check_loading(name: str, loading: dict) -> None:
    """Raise ValueError unless checkpoint and model have the same tensors; `loading`: transformers' loading info."""
    if different := sorted(loading["mismatched_keys"]):
        key, stored, wanted = different[0]
        raise ValueError(
            f"{name} has {len(different)} tensors of another shape than its config.json makes them: {key} is"
            f" {list(stored)}, not {list(wanted)}. Restore the config.json that belongs to the weights"
        )
    if missing := sorted(loading["missing_keys"]):
        raise ValueError(f"{name} lacks {len(missing)} tensors, which would be random: {some(missing)}. Copy it anew")
    if unexpected := sorted(key for key in loading["unexpected_keys"] if not UNUSED_TENSORS.search(key)):
        raise ValueError(
            f"{name} has {len(unexpected)} tensors that its config.json gives no place, so they would be lost:"
            f" {some(unexpected)}. Restore the config.json that belongs to the weights, or remove these tensors"
        )
    if errors := loading.get("error_msgs"):
        raise ValueError(f"{name} cannot be loaded: {one_line(errors[0])}")


def check_ties(model: PreTrainedModel, name: str) -> None:
    """Raise ValueError if the output projection should be the embeddings and is not: a copy would keep one of them."""
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    if not model.config.tie_word_embeddings or head is None or head.weight.is_meta:
        return
    if head.weight is not embeddings.weight and not torch.equal(head.weight, embeddings.weight):
        raise ValueError(
            f"{name} has an output projection that differs from the embeddings, to which its config.json ties it; set"
            " tie_word_embeddings to false"
        )


@torch.no_grad()
def check_finite_weights(model: nn.Module, name: str) -> None:
    """Raise ValueError, naming the tensors, if weights are NaN or infinite. One pass; skips what is on meta."""
    if bad := [key for key, tensor in model.state_dict().items() if not _is_finite(tensor)]:
        raise ValueError(
            f"{name} has NaN or infinite values in {len(bad)} tensors: {some(bad)}. The copy is damaged or its"
            " training diverged; give another checkpoint"
        )


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that hold a model's weights, [] if there are none.

    Raises:
        ValueError: the index of a sharded model is broken or names a file that is not there.
    """
    index = folder / f"{SAFETENSORS}.index.json"
    if (folder / SAFETENSORS).is_file():  # as transformers, which then ignores an index
        return [folder / SAFETENSORS]
    if not index.is_file():
        return []
    files = read_json(index).get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
        raise ValueError(f"{str(index)!r} has no weight_map of tensors and files; copy it anew")
    files = sorted(set(files.values()))
    if missing := [file for file in files if not (folder / file).is_file()]:
        raise ValueError(f"{str(folder)!r} lacks the weight files {some(missing)}; copy it anew")
    return [folder / file for file in files]


def read_json(file: Path) -> dict:
    """The object in a JSON file. Raises ValueError, naming the file, if there is no such thing in it."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{str(file)!r} is no JSON ({error}); copy it anew") from None
    if not isinstance(value, dict):
        raise ValueError(f"{str(file)!r} holds no JSON object; copy it anew")
    return value


def some(names: Iterable[str], count: int = 3) -> str:
    """The first few of many names."""
    names = list(names)
    return ", ".join(names[:count]) + (" ..." if len(names) > count else "")


def one_line(error: Exception | str) -> str:
    """The text of an error without line breaks; with its kind where the text is a mere name."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__} {text}" if isinstance(error, (KeyError, ArithmeticError)) else text


def _check_files(folder: Path) -> bool:
    """Raise ValueError for files that cannot be whole or plain. True if the weights are a pickle."""
    files = weight_files(folder)
    if not files:
        if any((folder / name).is_file() for name in (PICKLED, f"{PICKLED}.index.json")):
            return True
        raise ValueError(f"{str(folder)!r} has a config.json but no weights; there is no {SAFETENSORS}")
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                kinds = {key: opened.get_slice(key).get_dtype() for key in opened.keys()}  # noqa: SIM118, no dict
        except SafetensorError as error:
            raise ValueError(
                f"{str(folder)!r} has corrupt or truncated weights ({file.name}: {error}); copy it anew"
            ) from error
        packed = sorted(key for key, kind in kinds.items() if key.endswith("weight") and kind not in FLOATS)
        if packed:
            raise ValueError(
                f"{str(file)!r} holds {len(packed)} weights of the type {kinds[packed[0]]}: {some(packed)}. They look"
                " quantized; give the original weights in bf16, fp16 or fp32"
            )
    return False


def _check_sizes(folder: Path, get: Callable[[str], object]) -> None:
    """Raise ValueError for sizes below one and uneven groups of heads; `get`: a field by its name, or None."""
    for name in SIZES:
        size = get(name)
        if isinstance(size, int) and size < 1:
            raise ValueError(f"{str(folder)!r} has {name} {size} in config.json; it must be at least 1")
    heads, groups = get("num_attention_heads"), get("num_key_value_heads")
    if isinstance(heads, int) and isinstance(groups, int) and heads % groups:
        raise ValueError(
            f"{str(folder)!r} has num_attention_heads {heads} in config.json, which is no multiple of"
            f" num_key_value_heads, {groups}"
        )


def _check_functions(folder: Path, config: PreTrainedConfig) -> None:
    """Raise ValueError for an activation or a rotary embedding that transformers does not have."""
    named = [(name, getattr(config, name, None), ACT2FN) for name in ACTIVATIONS]
    rope_types = _rope_types(getattr(config, "rope_parameters", None))
    named += [("rope_type", kind, {"default": None, **ROPE_INIT_FUNCTIONS}) for kind in rope_types]
    for name, value, known in named:
        if isinstance(value, str) and value not in known:
            raise ValueError(
                f"{str(folder)!r} has {name} {value!r} in config.json; transformers knows {', '.join(sorted(known))}"
            )


def _quantization(raw: dict) -> str | None:
    """How a config.json says that its weights are quantized; None if they are plain or will be made so."""
    found = raw.get("quantization_config")
    if not found:
        return None
    method = str(found.get("quant_method", "unknown")) if isinstance(found, dict) else repr(found)
    return None if method in DEQUANTIZED else method


def _rope_types(parameters) -> list:
    """The kinds of rotary embedding in a config's `rope_parameters`, which may have a level for kinds of layers."""
    if not isinstance(parameters, dict):
        return []
    if "rope_type" in parameters or "type" in parameters:
        return [parameters.get("rope_type", parameters.get("type"))]
    return [kind for part in parameters.values() for kind in _rope_types(part)]


def _is_finite(tensor: torch.Tensor) -> bool:
    if tensor.is_meta or not tensor.is_floating_point() or not tensor.numel():
        return True
    return all(bound.isfinite() for bound in torch.aminmax(tensor))  # NaN is both; no copy of the tensor is made
