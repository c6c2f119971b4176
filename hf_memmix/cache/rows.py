"""Whether an input may continue a cache: it has the same rows, and hides of them what was hidden when it came."""

import torch
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.utils import is_torchdynamo_compiling

from .layer import count_hidden


def check_rows(cache: Cache, batch: int):
    """Raise ValueError if an adopted cache holds another number of sequences than the `batch` that continues them."""
    layer = cache.memmix_layer
    if layer is None or not layer.states or layer.batch_size == batch:
        return
    raise ValueError(
        f"the cache holds {layer.batch_size} sequences, the input {batch}; copy one with cache.expand(batch), or keep"
        " some with cache.batch_select_indices(indices)"
    )


def check_hidden(cache: Cache | None, attention_mask: Tensor | None):
    """Raise ValueError if a mask hides other tokens of the cache than those that were pads when they came.

    `attention_mask` [B, tokens], the cached ones first; None hides nothing. Not decided inside a compiled graph.
    """
    layer = getattr(cache, "memmix_layer", None)  # a cache that no model has adopted yet holds no memory
    if layer is None or not layer.is_initialized or is_torchdynamo_compiling():
        return
    if attention_mask is None and layer.hidden is None:
        return
    seen = int(layer.seen)
    if attention_mask is None:
        attention_mask = torch.ones(layer.batch_size, seen)
    shown = count_hidden(attention_mask[:, :seen], 0)
    known = torch.zeros_like(shown) if layer.hidden is None else layer.hidden.to(shown.device)
    if torch.equal(shown, known):
        return
    row = int((shown != known).any(1).nonzero()[0])
    counts = f"{int(shown[row, 0])} of the {seen} tokens in the cache, {int(known[row, 0])} of which were pads"
    raise ValueError(
        f"attention_mask hides in row {row} {counts} when they came: a memory can neither forget a token nor take in"
        " a pad. Hide the pads alone, also those that generate() fed after a row's last token, or start from an empty"
        " cache"
    )
