"""Options of vLLM that are refused with memory mixers: one row each, with the reason and what to do instead.

All are refused before the model loads. What vLLM itself refuses, on the machine at hand or for all models with states,
has no row.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from ...backbones import BACKBONES, backbone_of
from ...errors import UserError
from ...mixers import ATTENTION
from .versions import SPECULATION_SINCE, STATES_SINCE, installed_version, numbers_of

STATES = "MemMixStates"  # the connector of states.py
CHANGE_EMBEDDINGS = ", ".join(sorted(name for name, row in BACKBONES.items() if row.changes_embeddings))
CONTEXT_PARALLEL = ("decode_context_parallel_size", "prefill_context_parallel_size")


class Refusal(NamedTuple):
    """An option, whether a configuration of vLLM has it, and the end of the line that refuses it."""

    option: str
    given: Callable[[object], bool]
    reason: str


REFUSALS = (
    Refusal(
        "--speculative-config (with another method than ngram, or with vLLM before 0.29)",
        lambda c: (
            c.speculative_config is not None
            and (c.speculative_config.method != "ngram" or numbers_of(installed_version() or "") < SPECULATION_SINCE)
        ),
        "vLLM gives a draft model the blocks of the first group of layers, which may be that of the states; other"
        " methods need layers that were trained for the model; and vLLM before 0.29 does not tell the layers how many"
        " draft tokens were accepted. Use the method ngram, or leave the option out",
    ),
    Refusal(
        "--speculative-config (with prefix caching on a CPU)",
        lambda c: (
            c.speculative_config is not None
            and c.cache_config.enable_prefix_caching
            and c.device_config.device_type == "cpu"
        ),
        "vLLM copies the states of accepted draft tokens by a kernel that it has for GPUs only; add"
        " --no-enable-prefix-caching",
    ),
    Refusal(
        "--enable-lora (with --tensor-parallel-size)",
        lambda c: c.lora_config is not None and c.parallel_config.tensor_parallel_size > 1,
        "vLLM leaves an adapter out where a projection of a mixer is not cut into as many parts as there are GPUs, and"
        " does not tell. Use one GPU, or merge the adapter into the model (merge_and_unload of PEFT), serve the saved"
        " folder, and leave the option out",
    ),
    Refusal(
        "--enable-lora (on a CPU)",
        lambda c: c.lora_config is not None and c.device_config.device_type == "cpu",
        "vLLM on a CPU computes requests without an adapter with an adapter of other requests in their batch. Merge"
        " the adapter into the model (merge_and_unload of PEFT), serve the saved folder, and leave the option out",
    ),
    Refusal(
        "--pipeline-parallel-size (with a family that changes the embeddings before the first layer)",
        lambda c: c.parallel_config.pipeline_parallel_size > 1 and _repeats_steps(c),
        "vLLM's Transformers backend repeats this change before the first layer of every stage, so the answers of"
        f" {CHANGE_EMBEDDINGS} would be wrong; use --tensor-parallel-size",
    ),
    Refusal(
        "--pipeline-parallel-size (with --enforce-eager on a CPU)",
        lambda c: c.parallel_config.pipeline_parallel_size > 1 and _never_warms_up(c),
        "vLLM makes the buffers between the stages in a first run, which it leaves out on a CPU if it does not compile"
        " the model, so the first request fails, also that of a transformer; leave --enforce-eager out",
    ),
    Refusal(
        "--pipeline-parallel-size (with --speculative-config, --enable-lora, --quantization, --runner pooling or"
        " --states)",
        lambda c: c.parallel_config.pipeline_parallel_size > 1 and _needs_one_stage(c),
        "not tested together; use --tensor-parallel-size, or one GPU",
    ),
    Refusal(
        "--decode-context-parallel-size and --prefill-context-parallel-size",
        lambda c: any((getattr(c.parallel_config, name, None) or 1) > 1 for name in CONTEXT_PARALLEL),
        "a state cannot be divided by the positions of its tokens; use --tensor-parallel-size",
    ),
    Refusal(
        "--enable-dbo and --ubatch-size",
        lambda c: c.parallel_config.use_ubatching,
        "batches that are cut in two are not supported with memory mixers; leave the options out",
    ),
    Refusal(
        "--quantization (with another method than torchao, with --enable-lora, on several GPUs, or a quantised"
        " checkpoint)",
        lambda c: c.model_config.quantization is not None and not quantised_while_loading(c),
        "a quantised checkpoint has the projections of mixers quantised, too, which vLLM keeps in the type of the"
        " model; the rest was not tested. Serve a checkpoint in bfloat16, and let torchao quantise its other linear"
        " layers (hf_memmix/serving/README.md)",
    ),
    Refusal(
        "--mamba-cache-dtype and --mamba-ssm-cache-dtype",
        lambda c: not {c.cache_config.mamba_cache_dtype, c.cache_config.mamba_ssm_cache_dtype} <= {"auto", "float32"},
        "the states of memory mixers stay in float32, because errors would add up over the tokens; leave the options"
        " out",
    ),
    Refusal(
        "--mamba-cache-mode all",
        lambda c: c.cache_config.mamba_cache_mode == "all",
        "memory mixers keep the states of a prefix at the ends of steps, not of all blocks; use --mamba-cache-mode"
        " align",
    ),
    Refusal(
        "--no-enable-chunked-prefill (with prefix caching)",
        lambda c: c.cache_config.enable_prefix_caching and not c.scheduler_config.enable_chunked_prefill,
        "the states of a prefix are kept where a piece of the prompt ends; leave the option out, or add"
        " --no-enable-prefix-caching",
    ),
    Refusal(
        "--disable-hybrid-kv-cache-manager",
        lambda c: c.scheduler_config.disable_hybrid_kv_cache_manager is True,
        "states need blocks of another kind than keys and values, and vLLM has only one kind with this option; leave"
        " the option out",
    ),
    Refusal(
        "--kv-transfer-config and --kv-offloading-size",
        lambda c: (
            (c.kv_transfer_config is not None and c.kv_transfer_config.kv_connector != STATES)
            or c.cache_config.kv_offloading_size is not None
        ),
        "the states of memory mixers are not moved to other servers or to the CPU's memory by vLLM's connectors; leave"
        " the options out. memmix serve --states DIR keeps them on disk, where other servers find them",
    ),
    Refusal(
        "--max-model-len (above the length from which rotary embeddings of the types longrope and dynamic change)",
        lambda c: c.model_config.max_model_len > longest_with_fixed_rotation(c.model_config.hf_config),
        "these embeddings follow the longest sequence of a batch, so an answer would depend on the other requests;"
        " give the original_max_position_embeddings (longrope) or max_position_embeddings (dynamic) of config.json",
    ),
)


def refusal_of_options(vllm_config) -> str | None:
    """The message of the first option in `REFUSALS` that this configuration of vLLM uses, or None."""
    for option, given, reason in REFUSALS:
        if given(vllm_config):
            return f"{option}: {reason}"
    return None


def quantised_while_loading(vllm_config) -> bool:
    """Whether torchao quantises, on one GPU, the linear layers of a checkpoint that is not quantised itself.

    Those of feed-forward layers and of kept attention; the mixers have layers of their own.
    """
    model = vllm_config.model_config
    plain = vllm_config.lora_config is None and vllm_config.parallel_config.tensor_parallel_size == 1
    return plain and model.quantization == "torchao" and getattr(model.hf_config, "quantization_config", None) is None


def _repeats_steps(vllm_config) -> bool:
    return backbone_of(vllm_config.model_config.hf_config).changes_embeddings


def _never_warms_up(vllm_config) -> bool:
    never_compiles = vllm_config.model_config.enforce_eager or vllm_config.compilation_config.mode == 0
    return vllm_config.device_config.device_type == "cpu" and never_compiles


def _needs_one_stage(vllm_config) -> bool:
    model = vllm_config.model_config
    given = (vllm_config.speculative_config, vllm_config.lora_config, vllm_config.kv_transfer_config)
    return any(given) or model.quantization is not None or model.runner_type == "pooling"


def longest_with_fixed_rotation(config) -> float:
    """How many tokens a sequence may have until transformers changes the frequencies of the rotary embeddings.

    It does so for the whole batch, by its largest position. Infinity: never, or no layer uses the embeddings.
    """
    kinds, options = {*config.mixer_types}, config.mixers or {}
    if any(options.get(kind, {}).get("local_window") for kind in kinds):
        kinds.add("window")  # beside a memory
    if not any(kind == ATTENTION or options.get(kind, {}).get("use_rope") for kind in kinds):
        return float("inf")
    given = getattr(config, "rope_parameters", None) or {}
    by_kind = [parameters for parameters in given.values() if isinstance(parameters, dict)]
    limits = [float("inf")]
    for parameters in by_kind or [given]:
        kind = parameters.get("rope_type") or ""
        if kind == "longrope":
            limits.append(parameters["original_max_position_embeddings"])
        elif "dynamic" in kind:
            limits.append(config.max_position_embeddings)
    return min(limits)


def options_of_states(weights: Path, folder: Path, most_bytes: int) -> list[str]:
    """The options of `vllm serve` that keep the states of prompts in a folder, see states.py.

    Args:
        weights: the model's folder.
        folder: made if it is missing.
        most_bytes: that the states of all models may take there.

    Raises:
        UserError: nothing can be written there, or this version of vLLM is too old.
    """
    found = installed_version() or ""
    if numbers_of(found) < STATES_SINCE:
        raise UserError(f"--states: vLLM {found} is too old, it needs {STATES_SINCE[0]}.{STATES_SINCE[1]} or newer")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ".write").touch()
        (folder / ".write").unlink(missing_ok=True)  # another server may start, too
    except OSError as error:
        raise UserError(f"--states {folder}: {error.strerror}; give a folder that can be written") from error
    given = {"folder": str(folder.absolute()), "bytes": most_bytes, "model": str(weights.absolute())}
    connector = {"kv_connector": STATES, "kv_connector_module_path": __name__.replace("options", "states")}
    connector |= {"kv_role": "kv_both", "kv_load_failure_policy": "recompute", "kv_connector_extra_config": given}
    return ["--enable-prefix-caching", "--kv-transfer-config", json.dumps(connector)]
