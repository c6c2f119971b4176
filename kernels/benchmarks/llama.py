"""The Llama of the benchmarks, with random weights, and milliseconds per token of its `generate()`.

The time of a token is the time between two calls of a stopping criterion, so it includes everything that `generate()`
does. The first tokens, which compile, are not counted.
"""

import statistics
import time

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, StoppingCriteria, StoppingCriteriaList

import hf_memmix

SHAPE = {
    "vocab_size": 32000, "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 8192, "tie_word_embeddings": True,
    "max_position_embeddings": 2**21,
}  # fmt: skip


class TokenTimer(StoppingCriteria):
    """A stopping criterion that records the time of every token and never stops the generation."""

    def __init__(self):
        self.times = []

    def __call__(self, input_ids, scores, **kwargs):
        if input_ids.is_cuda:
            torch.cuda.synchronize()
        self.times.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def mixer_of(name: str) -> tuple[str, dict[str, dict]]:
    """The mixer that a benchmark calls by this name, and options by mixer.

    "gka+64" is `gka` with a window of 64 tokens beside it (`local_window`), "gka:32" is `gka` with a sketch of 32
    dimensions. Behind "/" stands the number of first tokens that windows read; without it, they read none of them.
    """
    name, _, sinks = name.partition("/")
    name, _, sketch = name.partition(":")
    kind, _, window = name.partition("+")
    options = {"window": {"use_rope": True, "sinks": int(sinks or 0)}}
    options |= {kind: {"local_window": int(window)}} if window else {}
    return kind, options | ({kind: {"sketch_dim": int(sketch)}} if sketch else {})


def build(mixer: str | None):
    """A Llama of `SHAPE` with random bf16 weights on the GPU; `mixer`, a name as in `mixer_of`, if given, replaces
    attention in every layer.
    """
    config = LlamaConfig(**SHAPE, dtype="bfloat16", bos_token_id=0, eos_token_id=None, pad_token_id=0)
    if mixer is not None:
        kind, options = mixer_of(mixer)
        config = hf_memmix.memmix_config(config, [kind] * config.num_hidden_layers, options)
    torch.manual_seed(0)
    with torch.device("cuda"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def measure(model, batch: int, context: int, new_tokens: int, cache: str) -> dict:
    """Median and 90th percentile of the ms per token after the first quarter of `new_tokens`, the seconds before the
    first token, and the peak memory.
    """
    prompt = torch.randint(3, SHAPE["vocab_size"], (batch, context), device=model.device)
    options = {"max_new_tokens": new_tokens, "do_sample": False, "cache_implementation": cache}
    if context > 16384:
        options["prefill_chunk_size"] = 8192
    timer = TokenTimer()
    torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    model.generate(prompt, stopping_criteria=StoppingCriteriaList([timer]), **options)
    steps = [1e3 * (b - a) for a, b in zip(timer.times, timer.times[1:], strict=False)][new_tokens // 4 :]
    return {
        "B": batch, "context": context, "cache": cache, "ms": round(statistics.median(steps), 3),
        "ms_p90": round(sorted(steps)[int(0.9 * len(steps))], 3), "first_token_s": round(timer.times[0] - start, 2),
        "peak_mib": round(torch.cuda.max_memory_allocated() / 2**20),
    }  # fmt: skip
