"""Writes a cache to one safetensors file and reads it, e.g. to continue a long document later.

Tensors are named `<layer>.<state>`. The header holds a description of the layers, the fields of the configuration that
decide what the states mean, and a checksum over everything.
"""

import hashlib
import json
import os
import tempfile
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from .._transformers import tensor_parallel_size
from ..configuration_memmix import MemMixConfig
from ..mixers import MIXERS
from ..operating_system import flush
from .identity import check_same_model, fingerprint
from .layer import RecurrentLayer
from .record import note_dtype
from .rows import check_beams, check_whole

FILE_NAME = "memory.safetensors"
FORMAT = "hf_memmix.cache.3"

# ---- saving


def save_cache(cache, directory: str | os.PathLike) -> Path:
    """See `RecurrentStateCache.save_pretrained`."""
    if (ranks := tensor_parallel_size(cache.config)) > 1:
        raise ValueError(
            f"a cache under tensor parallelism holds the states of one rank's heads, one of {ranks}: run the document"
            " through a model that was loaded without tensor parallelism, and save that cache"
        )
    check_whole(cache)
    tensors, layers = {}, []
    for i, layer in enumerate(cache.layers):
        named, description = _describe(layer)
        for name, tensor in named.items():
            if not torch.isfinite(tensor).all():
                raise ValueError(
                    f"layer {i}: {name} has NaN or infinite entries, so the cache is not saved; check the inputs and"
                    " weights of the model"
                )
            tensors[f"{i}.{name}"] = tensor.detach().to("cpu").contiguous().clone()
        layers.append(description)
    if not tensors:
        raise ValueError("the cache is empty: run the model on some tokens before saving it")
    header = {
        "format": FORMAT,
        "config": json.dumps(cache.config.to_diff_dict()),
        "fingerprint": json.dumps(fingerprint(cache.config)),
        "layers": json.dumps(layers),
        "static_length": json.dumps(cache.static_length),
        "dtype": str(cache.memmix.dtype).removeprefix("torch."),
    }
    header["checksum"] = _checksum(tensors, header)
    return _write_atomically(Path(directory), tensors, header)


def _describe(layer) -> tuple[dict[str, Tensor], dict]:
    """The tensors of a cache layer, and a description with which `_restore` rebuilds the layer."""
    if isinstance(layer, RecurrentLayer):
        check_beams(layer)
        states = layer.states if layer.is_initialized else {}
        description = {"kind": "recurrent", "static": layer.static, "seen": int(layer.seen)}
        if states and layer.hidden is not None:
            description["hidden"] = layer.hidden.tolist()
        if layer.virtual_tokens:
            description["virtual_tokens"] = layer.virtual_tokens
        return states, description
    if not isinstance(layer, (DynamicLayer, StaticLayer)):
        raise ValueError(f"a cache with a {type(layer).__name__} cannot be saved; use a dynamic or static cache")
    if not layer.is_initialized:
        return {}, {"kind": "empty"}
    description = {"kind": "attention", "seen": int(layer.get_seq_length())}
    keys, values = layer.keys, layer.values
    if isinstance(layer, StaticLayer):
        filled = description["filled"] = int(layer.cumulative_length)
        if not layer.is_sliding:
            keys, values = keys[:, :, :filled], values[:, :, :filled]
    return {"keys": keys, "values": values}, description


def _checksum(tensors: dict[str, Tensor], header: dict[str, str]) -> str:
    fields = {name: value for name, value in header.items() if name != "checksum"}
    digest = hashlib.sha256(json.dumps(fields, sort_keys=True).encode())
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _write_atomically(directory: Path, tensors: dict[str, Tensor], header: dict[str, str]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / FILE_NAME
    handle, temporary = tempfile.mkstemp(dir=directory, prefix=FILE_NAME, suffix=".part")
    os.close(handle)
    try:
        save_file(tensors, temporary, metadata=header)
        flush(temporary)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return path


# ---- loading


def load_cache(cls, directory: str | os.PathLike, config=None, device=None):
    """See `RecurrentStateCache.from_pretrained`."""
    path = Path(directory) / FILE_NAME
    if not path.is_file():
        raise ValueError(f"{directory} holds no saved cache: there is no file {FILE_NAME}")
    tensors, header = _read(path)
    if config is None:
        config = MemMixConfig.from_dict(json.loads(header["config"]))
    if not hasattr(config, "mixer_types"):
        raise ValueError(f"config is a {type(config).__name__} without mixers; give the config of the converted model")
    check_same_model(json.loads(header["fingerprint"]), config)
    layers = json.loads(header["layers"])
    cache = cls(config, max_cache_len=json.loads(header["static_length"]))
    for i, (layer, description) in enumerate(zip(cache.layers, layers, strict=True)):
        prefix = f"{i}."
        named = {k.removeprefix(prefix): v.to(device or "cpu") for k, v in tensors.items() if k.startswith(prefix)}
        for name, tensor in named.items():
            if not torch.isfinite(tensor).all():
                raise ValueError(f"{path}: layer {i}: {name} has NaN or infinite entries; write the file again")
        if named and isinstance(layer, RecurrentLayer):
            mixer = MIXERS[config.mixer_types[i]]
            options = mixer.options_class.from_dict(config.mixers.get(mixer.name, {}))
            try:
                mixer.check_states(options, named)
            except ValueError as error:
                raise ValueError(f"{path}: layer {i}: {error}") from error
        _restore(layer, named, description)
    # files of older versions have no dtype
    note_dtype(cache, getattr(torch, header.get("dtype", "None"), None))
    return cache


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, it is no dict
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is truncated or corrupt ({error}); write it again with save_pretrained") from error
    if header.get("format") != FORMAT:
        raise ValueError(
            f"{path} has format {header.get('format')!r}, expected {FORMAT!r}: write it again with this version of"
            " hf_memmix"
        )
    if header.get("checksum") != _checksum(tensors, header):
        raise ValueError(f"{path} is corrupt: its checksum is wrong; write it again with save_pretrained")
    return tensors, header


def _restore(layer, named: dict[str, Tensor], description: dict):
    """Fill an empty layer of a new cache."""
    if not named:
        return
    if isinstance(layer, RecurrentLayer):
        layer.allocate(named)
        if "hidden" in description:
            layer.add_hidden(torch.tensor(description["hidden"], device=layer.device))
        layer.advance(description["seen"])
        layer.virtual_tokens = description.get("virtual_tokens", 0)
        return
    keys, values = named["keys"], named["values"]
    layer.lazy_initialization(keys, values)
    if isinstance(layer, StaticLayer):
        layer.keys[:, :, : keys.shape[2]], layer.values[:, :, : values.shape[2]] = keys, values
        layer.cumulative_length.fill_(description["filled"])
        if isinstance(layer, StaticSlidingWindowLayer):
            layer.cumulative_length_int = description["seen"]
        return
    layer.keys, layer.values = keys, values
    if isinstance(layer, DynamicSlidingWindowLayer):
        layer.cumulative_length = description["seen"]
