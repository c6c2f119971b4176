"""Options of vLLM that are refused with memory mixers: one row each, with the reason and what to do instead.

All are refused before the model loads. What vLLM itself refuses, on the machine at hand or for all models with states,
has no row.
"""

from collections.abc import Callable
from typing import NamedTuple

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
        "--kv-transfer-config and --kv-offloading-size",
        lambda c: c.kv_transfer_config is not None or c.cache_config.kv_offloading_size is not None,
        "the states of memory mixers are not moved to other servers or to the CPU's memory; leave the options out",
    ),
)


def refusal_of_options(vllm_config) -> str | None:
    """The message of the first option in `REFUSALS` that this configuration of vLLM uses, or None."""
    for option, given, reason in REFUSALS:
        if given(vllm_config):
            return f"{option}: {reason}"
    return None
