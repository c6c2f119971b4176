"""How many sequences fit into the memory, as vLLM itself counts: in its blocks, by its own functions.

The options of `vllm serve` are read by vLLM's parser, so everything that vLLM or the plugin refuses is refused here,
before a model loads. The layers that have a cache are made without memory, only to ask for the sizes of their blocks.
"""

import os
from pathlib import Path

import torch

from ...errors import UserError
from ...mixers import ATTENTION, new_layer
from ..state_store import QUANTIZATION_FILE

NO_PLUGIN = "vLLM would build the model without the plugin, which puts in the mixers; leave the option out"
TORCHAO = {"quantization_config_dict_json", QUANTIZATION_FILE}  # in --hf-overrides
# vLLM writes its log to stdout, where `memmix serve --json` writes its answer
QUIET = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_LOGGING_STREAM": "ext://sys.stderr"}


def configuration(folder: Path, arguments: list[str]):
    """vLLM's configuration (VllmConfig) for a model folder and options of `vllm serve`.

    Raises:
        UserError: vLLM or the plugin refuses an option, vLLM does not know it, or it needs a library that is missing.
    """
    before = {name: os.environ.get(name) for name in QUIET}
    os.environ.update({name: value for name, value in QUIET.items() if before[name] is None})
    try:
        from pydantic import ValidationError
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.entrypoints.cli.serve import make_arg_parser
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        parser = make_arg_parser(FlexibleArgumentParser(prog="vllm serve"))
        parser.error = _refuse  # by itself it prints all options before the line
        given = parser.parse_args(["--model", str(folder), *arguments])
        if given.model != str(folder) or given.model_tag is not None:
            other = given.model_tag or f"--model {given.model}"
            raise UserError(f"vllm serve: {other!r} stands beside the model {str(folder)!r}; leave it out")
        if given.model_impl not in ("auto", "vllm"):
            raise UserError(f"--model-impl {given.model_impl}: {NO_PLUGIN}")
        if given.quantization == "torchao" and not TORCHAO & {*(given.hf_overrides or ())}:
            raise UserError(
                "--quantization torchao: vLLM does not know how torchao shall round; give --hf-overrides as in"
                " hf_memmix/serving/README.md"
            )
        try:
            return AsyncEngineArgs.from_cli_args(given).create_engine_config()
        except ValidationError as error:  # "Value error, " and then the line of a check of vLLM or of ours
            raise UserError("; ".join(_of_field(found) for found in error.errors())) from error
        except (ValueError, ImportError) as error:  # ImportError: the library of an option is not installed
            raise UserError(_line(error)) from error
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def add_layers(vllm_config):
    """Enter layers without memory into vLLM's table of layers with a cache: those that the model will have."""
    from vllm.model_executor.layers.attention import Attention

    from .config import attention_window, original_config
    from .layer import add_memory_layers
    from .parameters import local_sizes

    model, parallel, cache = vllm_config.model_config, vllm_config.parallel_config, vllm_config.cache_config
    config = original_config(model.hf_config)
    mixers = {}
    for i, kind in enumerate(config.mixer_types):
        with torch.device("meta"):
            if kind != ATTENTION:
                mixers[f"layers.{i}.mixer"] = local_sizes(new_layer(kind, config, i), parallel.tensor_parallel_size)
                continue
            Attention(
                num_heads=model.get_num_attention_heads(parallel),
                head_size=model.get_head_size(),
                scale=1.0,
                num_kv_heads=model.get_num_kv_heads(parallel),
                cache_config=cache,
                per_layer_sliding_window=attention_window(config, i),
                prefix=f"layers.{i}.attn",
            )
    add_memory_layers(mixers, vllm_config)


def sequences_that_fit(vllm_config, memory: int, lengths: tuple[int, ...]) -> dict[int, float]:
    """By their length, how many sequences fit at once into `memory` bytes per device.

    vLLM prints the same number for the longest length at its start ("Maximum concurrency").

    Args:
        vllm_config: from `configuration`; its block sizes are set here.
        lengths: those over the longest that the server takes are cut to it.

    Raises:
        UserError: not one sequence of the longest length fits.
    """
    from vllm.v1.core.kv_cache_utils import get_max_concurrency_for_kv_cache_config

    blocks, model = divided(vllm_config, memory), vllm_config.model_config
    longest, found = model.max_model_len, {}
    for length in sorted({min(length, longest) for length in lengths}):
        model.max_model_len = length
        found[length] = get_max_concurrency_for_kv_cache_config(vllm_config, blocks)
    model.max_model_len = longest
    return found


def divided(vllm_config, memory: int):
    """How vLLM divides `memory` bytes of a device (KVCacheConfig): groups of layers, and the number of blocks.

    Raises:
        UserError: as above.
    """
    from vllm.config import set_current_vllm_config
    from vllm.platforms import current_platform
    from vllm.v1.engine.core import get_kv_cache_configs  # its module differs between versions

    from .compat import resolve_layout

    with set_current_vllm_config(vllm_config):
        add_layers(vllm_config)
    current_platform.update_block_size_for_backend(vllm_config)
    with set_current_vllm_config(vllm_config):
        layers = vllm_config.compilation_config.static_forward_context
        specs = {name: layer.get_kv_cache_spec(vllm_config) for name, layer in layers.items()}
        resolve_layout(vllm_config, specs)
        stages = _stages(specs, vllm_config)
        try:
            # the blocks have the same groups and the same number in all stages
            blocks, *_ = get_kv_cache_configs(vllm_config, stages, [memory] * len(stages))
        except ValueError as error:
            raise UserError(_line(error)) from error
    return blocks


def _stages(specs: dict, vllm_config) -> list[dict]:
    """What the layers of each stage of the pipeline store."""
    from vllm.distributed.utils import get_pp_indices

    stages, found = vllm_config.parallel_config.pipeline_parallel_size, []
    layers = vllm_config.model_config.hf_config.mixer_types
    for stage in range(stages):
        start, end = get_pp_indices(len(layers), stage, stages)
        found.append({name: spec for name, spec in specs.items() if start <= int(name.split(".")[1]) < end})
    return found


def _refuse(message: str):
    raise UserError(f"vllm serve: {_line(message)}")


def _of_field(error: dict) -> str:
    """An error of pydantic in one line, with the option that it is about if it is about one."""
    text = _line(error["msg"].partition("Value error, ")[2] or error["msg"])
    return f"--{str(error['loc'][0]).replace('_', '-')} {error['input']}: {text}" if error["loc"] else text


def _line(error) -> str:
    return " ".join(str(error).split())
