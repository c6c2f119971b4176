"""Whether vLLM here can serve a model, and how many sequences of it fit into the memory."""

import os
from collections import Counter
from importlib.metadata import entry_points
from pathlib import Path

import torch
from transformers import AutoConfig

from ..configuration_memmix import MemMixConfig
from ..errors import UserError
from .families import refusal_of_serving
from .footprint import Footprint
from .vllm import blocks
from .vllm.versions import INSTALL, installed_version, refusal_of_version

PLUGIN = "memmix"
CPU_SPACE = "VLLM_CPU_KVCACHE_SPACE"  # GiB for states, keys and values on a CPU


def check_installation():
    """Raise UserError unless a vLLM of a tested version is here, will load the plugin, and can read its settings."""
    found = installed_version()
    if found is None:
        raise UserError(f"vLLM is not installed: {INSTALL}")
    if refusal := refusal_of_version(found):
        raise UserError(refusal)
    if not entry_points(group="vllm.general_plugins", name=PLUGIN):
        raise UserError(
            "the plugin of vLLM is not registered: this installation of hf-memmix is older than its sources; install"
            " it again (pip install . in its checkout)"
        )
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and PLUGIN not in allowed.split(","):
        raise UserError(
            f"VLLM_PLUGINS={allowed!r} keeps vLLM from loading the plugin; add {PLUGIN} to it, or unset it"
        )
    space = os.environ.get(CPU_SPACE)
    if space and not (space.isdecimal() and int(space)):
        raise UserError(f"{CPU_SPACE}={space} is no whole number of GiB; vLLM needs 1 or more, or unset it")


def check_model(folder: Path) -> MemMixConfig:
    """The configuration of a model folder.

    Raises:
        UserError: it is no converted model, or vLLM cannot serve its family.
    """
    if not (folder / "config.json").is_file():
        raise UserError(f"{str(folder)!r} is not a model folder: it has no config.json")
    config = AutoConfig.from_pretrained(folder)
    if not isinstance(config, MemMixConfig):
        raise UserError(
            f"{str(folder)!r} holds a {config.model_type!r} model without mixers: vLLM serves it without hf_memmix, or"
            " convert it first (memmix convert)"
        )
    if refusal := refusal_of_serving(config):
        raise UserError(refusal)
    return config


def capacity(folder: Path, config: MemMixConfig, arguments: list[str], lengths: tuple[int, ...]) -> dict:
    """What a sequence costs and how many fit, with the options of `vllm serve`.

    Returns:
        `states` (per mixer: how many layers, bytes of one sequence in each), `state_bytes`, `bytes` (of one sequence
        by its length, at most the longest that the server takes), `free` (bytes for sequences, None if unknown),
        `memory` (where that number comes from), `on_gpu`, `fit` (sequences by length, None if unknown), `blocks`
        (bytes that one sequence takes in vLLM's blocks, by length). `free` and `blocks` are per device. The other
        bytes are those of all stages of a pipeline.

    Raises:
        UserError: an option is refused, or no sequence fits.
    """
    vllm_config = blocks.configuration(folder, arguments)
    dtype, ranks = vllm_config.model_config.dtype, vllm_config.parallel_config.tensor_parallel_size
    fp8 = vllm_config.cache_config.cache_dtype.startswith("fp8")
    footprint = Footprint.of(config, dtype, torch.float8_e4m3fn if fp8 else None)
    free, source = _free_memory(folder, vllm_config)
    fit = None if free is None else blocks.sequences_that_fit(vllm_config, free, lengths)
    longest = vllm_config.model_config.max_model_len
    kinds = Counter((config.mixer_types[i], size // ranks) for i, size in footprint.states.items())
    return {
        "model": str(folder),
        "dtype": str(dtype).removeprefix("torch."),
        "states": [{"mixer": mixer, "layers": n, "bytes": size} for (mixer, size), n in kinds.items()],
        "attention_layers": len(footprint.kept),
        "state_bytes": footprint.state_bytes() // ranks,
        "bytes": {n: footprint.total(n) // ranks for n in sorted({min(n, longest) for n in lengths})},
        "free": free,
        "memory": source,
        "on_gpu": torch.cuda.is_available(),
        "fit": fit and {length: int(count) for length, count in fit.items()},
        "blocks": fit and {length: int(free / count) for length, count in fit.items()},
    }


def _free_memory(folder: Path, vllm_config) -> tuple[int | None, str]:
    """Bytes for sequences on each device, and where the number comes from."""
    cache, space = vllm_config.cache_config, os.environ.get(CPU_SPACE)
    if (given := cache.kv_cache_memory_bytes) is not None:
        on_cpu = space and not torch.cuda.is_available()  # there the variable is stronger than the option
        return given, f"{CPU_SPACE}={space} GiB" if on_cpu else "--kv-cache-memory-bytes"
    if torch.cuda.is_available():
        share, parallel = cache.gpu_memory_utilization, vllm_config.parallel_config
        devices = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
        weights = sum(file.stat().st_size for file in folder.glob("*.safetensors")) // devices
        total = torch.cuda.get_device_properties(0).total_memory
        return int(share * total) - weights, f"{share:g} of the GPU's memory without the weights; vLLM measures less"
    return None, f"set {CPU_SPACE} to the GiB that sequences may take"
