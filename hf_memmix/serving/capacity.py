"""Whether vLLM here can serve a model, and how many sequences of it fit into the memory."""

import os
import re
from collections import Counter
from importlib.metadata import entry_points
from pathlib import Path

import torch
from transformers import AutoConfig

from ..configuration_memmix import MemMixConfig
from .families import refusal_of_serving
from .footprint import Footprint
from .vllm.versions import INSTALL, installed_version, refusal_of_version

PLUGIN = "memmix"
UTILIZATION = 0.92  # vLLM's default share of a GPU's memory
GIB = 2**30


def check_installation():
    """Raise ValueError unless a vLLM of a tested version is here and will load the plugin."""
    found = installed_version()
    if found is None:
        raise ValueError(f"vLLM is not installed: {INSTALL}")
    if refusal := refusal_of_version(found):
        raise ValueError(refusal)
    if not entry_points(group="vllm.general_plugins", name=PLUGIN):
        raise ValueError(
            "the plugin of vLLM is not registered: this installation of hf-memmix is older than its sources; install"
            " it again (pip install 'hf-memmix[vllm]')"
        )
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and PLUGIN not in allowed.split(","):
        raise ValueError(f"VLLM_PLUGINS={allowed} keeps vLLM from loading the plugin; add {PLUGIN} to it, or unset it")


def check_model(folder: Path) -> MemMixConfig:
    """The configuration of a model folder.

    Raises:
        ValueError: it is no converted model, or vLLM cannot serve its family.
    """
    if not (folder / "config.json").is_file():
        raise ValueError(f"{str(folder)!r} is not a model folder: it has no config.json")
    config = AutoConfig.from_pretrained(folder)
    if not isinstance(config, MemMixConfig):
        raise ValueError(
            f"{str(folder)!r} holds a {config.model_type!r} model without mixers: vLLM serves it without hf_memmix, or"
            " convert it first (memmix convert)"
        )
    if refusal := refusal_of_serving(config):
        raise ValueError(refusal)
    return config


def capacity(folder: Path, config: MemMixConfig, arguments: list[str], lengths: tuple[int, ...]) -> dict:
    """What a sequence costs and how many fit, with the options of `vllm serve`.

    vLLM gives out memory in blocks and keeps prefixes in blocks that are free, so the numbers are estimates.

    Returns:
        `states` (per mixer: how many layers, bytes of one sequence in each), `state_bytes`, `bytes` (of one sequence
        by its length, at most the longest that the server takes), `free` (bytes for sequences, None if unknown),
        `memory` (where that number comes from), `fit` (sequences by length, None if unknown).
    """
    dtype = _dtype(config, option(arguments, "--dtype"))
    fp8 = (option(arguments, "--kv-cache-dtype") or "").startswith("fp8")
    footprint = Footprint.of(config, dtype, torch.float8_e4m3fn if fp8 else None)
    longest = _longest(option(arguments, "--max-model-len")) or config.max_position_embeddings
    lengths = sorted({min(length, longest) for length in lengths})
    ranks = int(option(arguments, "--tensor-parallel-size", "-tp") or 1)
    totals = {length: footprint.total(length) // ranks for length in lengths}
    free, source = _free_memory(folder, arguments, ranks)
    kinds = Counter((config.mixer_types[i], size // ranks) for i, size in footprint.states.items())
    return {
        "model": str(folder),
        "dtype": str(dtype).removeprefix("torch."),
        "states": [{"mixer": mixer, "layers": n, "bytes": size} for (mixer, size), n in kinds.items()],
        "attention_layers": len(footprint.kept),
        "state_bytes": footprint.state_bytes() // ranks,
        "bytes": totals,
        "free": free,
        "memory": source,
        "fit": None if free is None else {length: max(free, 0) // total for length, total in totals.items()},
    }


def option(arguments: list[str], *names: str) -> str | None:
    """The value of an option of `vllm serve`, as `--name value` or `--name=value`; None if it is not given."""
    found = None
    for i, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name.replace("_", "-") in names:
            found = value if equals else next(iter(arguments[i + 1 :]), None)
    return found


def _longest(text: str | None) -> int | None:
    """The value of `--max-model-len` as vLLM reads it: 4096, 1k (1,000), 25.6k, 1K (1,024); None if vLLM chooses it.

    It does so for "auto" and -1: then it takes at most `max_position_embeddings`, and less if that does not fit.

    Raises:
        ValueError: the text is none of these.
    """
    if text is None or text.strip().lower() in ("auto", "-1"):
        return None
    return _size("--max-model-len", text, "tokens; give one such as 4096 or 4k, or auto")


def _dtype(config, name: str | None) -> torch.dtype:
    """As vLLM chooses it: "auto" is the stored dtype, and bf16 instead of fp32."""
    if name in (None, "auto"):
        stored = config.dtype or torch.float32
        return torch.bfloat16 if stored == torch.float32 else stored
    found = getattr(torch, {"half": "float16", "float": "float32"}.get(name, name), None)
    if not (isinstance(found, torch.dtype) and found.is_floating_point):
        raise ValueError(f"--dtype {name} is no dtype; give auto, bfloat16, float16 or float32")
    return found


def _free_memory(folder: Path, arguments: list[str], ranks: int) -> tuple[int | None, str]:
    """Bytes for sequences on each device, and where the number comes from."""
    if given := option(arguments, "--kv-cache-memory-bytes"):
        return _size(
            "--kv-cache-memory-bytes", given, "bytes; give one such as 4G"
        ), f"--kv-cache-memory-bytes {given}"
    share = float(option(arguments, "--gpu-memory-utilization") or UTILIZATION)
    weights = sum(file.stat().st_size for file in folder.glob("*.safetensors")) // ranks
    if torch.cuda.is_available():
        total = torch.cuda.get_device_properties(0).total_memory
        return int(share * total) - weights, f"{share:g} of the GPU's memory without the weights"
    if space := os.environ.get("VLLM_CPU_KVCACHE_SPACE"):
        return int(float(space) * GIB), f"VLLM_CPU_KVCACHE_SPACE={space} GiB"
    return None, "set VLLM_CPU_KVCACHE_SPACE to the GiB that sequences may take"


def _size(option_name: str, text: str, unit_and_remedy: str) -> int:
    """A number as vLLM reads it: "4K" is 4 * 2**10, "4k" and "4.0k" are 4 * 10**3. Raises ValueError for others."""
    match = re.fullmatch(r"(?:(\d+)([KMGT]?)|(\d+(?:\.\d+)?)([kmgt]))", text.strip())
    size = 0
    if match:
        whole, binary, number, decimal = match.groups()
        size = (
            int(whole) * 1024 ** "_KMGT".index(binary or "_")
            if whole
            else float(number) * 1000 ** "_kmgt".index(decimal)
        )
    if size < 1:
        raise ValueError(f"{option_name} {text} is no number of {unit_and_remedy}")
    return int(size)
