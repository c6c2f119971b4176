"""Which mixers share a page of vLLM's memory, and how large the pages are.

vLLM divides the layers of a model into groups of equal numbers of layers. Each group costs the processor time in every
step. With attention in one of four layers there would be three groups of states beside one of keys and values. So a
page holds the states of three mixers there: vLLM sees as many layers with states as layers with attention, which makes
two groups. A model without attention has one group by itself, and each mixer has pages of its own.

vLLM makes all pages of a model with attention equally large: a block of keys and values takes more tokens.
"""

import math
from collections import Counter
from typing import NamedTuple

import torch
from vllm.distributed.utils import get_pp_indices

from ...mixers import ATTENTION, MemoryMixer
from ...mixers.pages import page_layout
from .config import attention_window, layer_kinds, mixers_of, original_config
from .parameters import local_sizes

# all states of a sequence are one array for vLLM. It is not uint8: vLLM 0.26 finds out strides by an empty tensor in
# fp32 with as many elements as all pages have, which would be four times their memory
PAGE_DTYPE = torch.int32


class Page(NamedTuple):
    """One sequence's page in one layer that vLLM sees.

    Args:
        layers: indices of the layers whose states it holds, one after the other.
        size: bytes, at least those of the states.
    """

    layers: tuple[int, ...]
    size: int


def page_plan(vllm_config) -> list[Page]:
    """The pages of all layers of a model, in all stages of a pipeline; the same in every process of a server."""
    config, parallel = original_config(vllm_config.model_config.hf_config), vllm_config.parallel_config
    sizes = bytes_of_layers(config, parallel.tensor_parallel_size, vllm_config.model_config.dtype)
    together, most = _most_mixers(config, len(sizes)), _most_bytes(vllm_config)
    pages = _divide(config, sizes, together, parallel.pipeline_parallel_size)
    while together > 1 and max(page.size for page in pages) > most:
        together -= 1
        pages = _divide(config, sizes, together, parallel.pipeline_parallel_size)
    # with prefix caching 0.26 can copy states only if all pages are equally large
    if ATTENTION in config.mixer_types or vllm_config.cache_config.enable_prefix_caching:
        largest = max(page.size for page in pages)
        pages = [page._replace(size=largest) for page in pages]
    return pages


def _divide(config, sizes: dict[int, int], together: int, stages: int) -> list[Page]:
    """Pages of up to `together` mixers of one stage. `sizes`: bytes by layer."""
    pages = []
    for stage in range(stages):
        start, end = get_pp_indices(len(config.mixer_types), stage, stages)
        own = [i for i in sizes if start <= i < end]
        pages += [tuple(own[i : i + together]) for i in range(0, len(own), together)]
    return [Page(layers, sum(sizes[i] for i in layers)) for layers in pages]


def largest_page(vllm_config) -> int:
    """The bytes of the largest page of a model, in whichever stage of a pipeline it is."""
    return max(page.size for page in page_plan(vllm_config))


def _most_mixers(config, mixers: int) -> int:
    """How many of `mixers` share a page, so that vLLM makes one group of layers with states."""
    windows = Counter(attention_window(config, i) for i, kind in enumerate(config.mixer_types) if kind == ATTENTION)
    fewest = min(windows.values(), default=0)
    # vLLM makes groups of the fewest layers of a kind, or of the most, if these are not 1.5 times as many
    return -(-mixers // fewest) if fewest and mixers >= 1.5 * fewest else 1


def bytes_of_layers(config, ranks: int, dtype: torch.dtype) -> dict[int, int]:
    """What one sequence takes in each layer with a mixer on one of `ranks` ranks, with activations of `dtype`."""
    sizes = {kind: page_bytes(local_sizes(mixer, ranks), dtype) for kind, mixer in mixers_of(config).items()}
    return {i: sizes[kind] for i, kind in layer_kinds(config).items()}


def page_bytes(mixer: MemoryMixer, dtype: torch.dtype) -> int:
    """What one sequence takes in one mixer, with activations of `dtype`."""
    return page_layout(mixer.state_shapes(1, dtype))[1]


def page_shape(size: int) -> tuple[tuple[int, ...], ...]:
    """What vLLM is told of the states of a page of `size` bytes: one array of `PAGE_DTYPE`."""
    return ((size // PAGE_DTYPE.itemsize,),)


def _most_bytes(vllm_config) -> float:
    """The size of a page that mixers may share. With prefix caching a state is kept at the ends of blocks: a step that
    several prompts share must still reach one.
    """
    if not vllm_config.cache_config.enable_prefix_caching:
        return math.inf
    model, scheduler = vllm_config.model_config, vllm_config.scheduler_config
    tokens = min(scheduler.max_num_batched_tokens // 2, scheduler.long_prefill_token_threshold or math.inf)
    element = 1 if vllm_config.cache_config.cache_dtype.startswith("fp8") else model.dtype.itemsize
    keys = model.get_num_kv_heads(vllm_config.parallel_config) * model.get_head_size()
    return tokens * 2 * keys * element
