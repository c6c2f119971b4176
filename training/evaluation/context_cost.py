"""Cost of a context at decode time: bytes of the cache and milliseconds per token.

A prefill of a few hundred tokens fills the cache. Then random keys and values are added to the attention layers, up to
the wanted context length: bytes and time do not depend on the values, and a prefill of 128k tokens would take hours on
a CPU. Memory layers do not grow: they only count these tokens.
"""

import statistics
import time

import torch
from torch import nn
from transformers import Cache, DynamicCache, StaticCache

from hf_memmix import MemMixConfig, RecurrentStateCache
from hf_memmix._generation_hooks import CACHE
from hf_memmix.cache import RecurrentLayer

PREFILL = 256
WARMUP = 2
ROUNDS = 3


def cache_bytes(cache: Cache) -> int:
    """Bytes of all tensors a cache holds now."""
    if isinstance(cache, RecurrentStateCache):
        return cache.nbytes
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers if layer.is_initialized)


@torch.inference_mode()
def filled_cache(model: nn.Module, context: int, max_cache_len: int | None = None) -> Cache:
    """A cache of one sequence of `context` tokens: dynamic, or static with the length `max_cache_len`."""
    cache = _new_cache(model, max_cache_len)
    prefill = min(context, PREFILL)
    ids = torch.randint(model.config.vocab_size, (1, prefill), device=model.device)
    model(input_ids=ids, **{CACHE: cache}, use_cache=True, logits_to_keep=1)
    if context > prefill:
        for layer in cache.layers:
            if torch.is_tensor(getattr(layer, "keys", None)):
                batch, heads, _, head_dim = layer.keys.shape
                like = {"dtype": layer.keys.dtype, "device": layer.keys.device}
                keys = torch.randn(batch, heads, context - prefill, head_dim, **like)
                layer.update(keys, torch.randn(*keys.shape[:3], layer.values.shape[-1], **like))
            elif isinstance(layer, RecurrentLayer):  # its states have one size, whatever they have read
                layer.advance(context - prefill)
    return cache


@torch.inference_mode()
def milliseconds_per_token(model: nn.Module, cache: Cache, context: int, steps: int) -> float:
    """Time of an eager decode step from `cache`, which holds `context` tokens and grows by WARMUP + ROUNDS * steps.

    It is the smallest median of ROUNDS rounds, because other processes on the machine can only add time.
    """
    token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    times = []
    for step in range(WARMUP + ROUNDS * steps):
        position = torch.full((1, 1), context + step, device=model.device)
        _synchronize(model.device)
        start = time.perf_counter()
        model(input_ids=token, position_ids=position, **{CACHE: cache}, use_cache=True)
        _synchronize(model.device)
        times.append(time.perf_counter() - start)
    del times[:WARMUP]
    return 1e3 * min(statistics.median(times[i : i + steps]) for i in range(0, len(times), steps))


def context_cost(model: nn.Module, context: int, steps: int = 7) -> dict:
    """`{"context", "cache_bytes", "ms_per_token", "cache"}` of `model` after `context` tokens of one sequence.

    The bytes are those of the dynamic cache, which holds exactly `context` tokens. The time is the smaller one of the
    dynamic and the static cache ("cache" names it), because the dynamic cache copies itself at every step.
    """
    growing = filled_cache(model, context)
    row = {"context": context, "cache_bytes": cache_bytes(growing)}
    times = {"dynamic": milliseconds_per_token(model, growing, context, steps)}
    del growing
    static = filled_cache(model, context, max_cache_len=context + WARMUP + ROUNDS * steps)
    times["static"] = milliseconds_per_token(model, static, context, steps)
    best = min(times, key=times.get)
    return row | {"ms_per_token": round(times[best], 3), "cache": best}


def _new_cache(model: nn.Module, max_cache_len: int | None) -> Cache:
    if isinstance(model.config, MemMixConfig):
        return RecurrentStateCache(model.config, max_cache_len=max_cache_len)
    if max_cache_len is None:
        return DynamicCache(config=model.config)
    return StaticCache(config=model.config, max_cache_len=max_cache_len)


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":  # Apple's and Intel's GPUs, too, return before they have computed
        torch.accelerator.synchronize(device)
