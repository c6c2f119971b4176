"""Options of vLLM that are refused with memory mixers: one row each, with the reason and what to do instead.

All are refused before the model loads. What vLLM itself refuses, on the machine at hand or for all models with states,
has no row.
"""

from collections.abc import Callable
from typing import NamedTuple

from ...mixers import ATTENTION

CONTEXT_PARALLEL = ("decode_context_parallel_size", "prefill_context_parallel_size")


class Refusal(NamedTuple):
    """An option, whether a configuration of vLLM has it, and the end of the line that refuses it."""

    option: str
    given: Callable[[object], bool]
    reason: str


REFUSALS = (
    Refusal(
        "--speculative-config",
        lambda c: c.speculative_config is not None,
        "speculative decoding is not supported with memory mixers: a rejected token cannot be taken out of a state."
        " Leave the option out",
    ),
    Refusal(
        "--enable-lora",
        lambda c: c.lora_config is not None,
        "LoRA adapters are not supported with memory mixers; merge the adapter into the model (merge_and_unload of"
        " PEFT), serve the saved folder, and leave the option out",
    ),
    Refusal(
        "--pipeline-parallel-size",
        lambda c: c.parallel_config.pipeline_parallel_size > 1,
        "pipeline parallelism is not supported with memory mixers; use --tensor-parallel-size",
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
        "--quantization (or a checkpoint that is quantised)",
        lambda c: c.model_config.quantization is not None,
        "quantised weights are not supported with memory mixers: the small projections of their gates would be rounded"
        " too. Serve the checkpoint in bfloat16; --kv-cache-dtype fp8 halves the keys and values of attention layers",
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
        lambda c: c.kv_transfer_config is not None or c.cache_config.kv_offloading_size is not None,
        "the states of memory mixers are not moved to other servers or to the CPU's memory; leave the options out",
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


def longest_with_fixed_rotation(config) -> float:
    """How many tokens a sequence may have until transformers changes the frequencies of the rotary embeddings.

    It does so for the whole batch, by its largest position. Infinity: never, or no layer uses the embeddings.
    """
    kinds, options = config.mixer_types, config.mixers or {}
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
