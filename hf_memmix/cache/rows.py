"""Checks whether an input may continue a cache.

It has as many rows, its mask hides the tokens that were pads, and the cache is not left by beam search or by a forward
that broke off.
"""

import torch
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.utils import is_torchdynamo_compiling

from .layer import RecurrentLayer, count_hidden
from .record import record_of


def check_rows(cache: Cache, batch: int):
    """Raise ValueError if an adopted cache has not `batch` sequences, or is left by beam search or half a forward."""
    layer = cache.memmix.layer
    if layer is None:
        return
    if not layer.static:  # the count of a static cache is on the device: generate() asks once
        check_whole(cache)
    if not layer.states:
        return
    check_beams(layer)
    if layer.batch_size == batch:
        return
    raise ValueError(
        f"the cache holds {layer.batch_size} sequences, the input {batch}; copy one with cache.expand(batch), or keep"
        " some with cache.batch_select_indices(indices)"
    )


def check_whole(cache: Cache):
    """Raise ValueError if a forward has broken off between two layers of a cache, by an error or a signal.

    The layers run in order, so the first one has then read tokens that the last one has not. A compiled graph skips
    this check.
    """
    if is_torchdynamo_compiling():
        return
    first, last = int(cache.layers[0].get_seq_length()), int(cache.layers[-1].get_seq_length())
    if first != last:
        raise ValueError(
            f"a forward has broken off inside the model: the first layer of this cache has read {first} tokens, the"
            f" last one {last}. Start from an empty cache, or call cache.reset()"
        )


def check_beams(layer: RecurrentLayer):
    """Raise ValueError if beam search has filled the layer."""
    if layer.of_beams:
        raise ValueError(
            "beam search has filled this cache: its rows are those of the last running beams, in another order than"
            " the returned sequences, and those of beams that ended early are lost. Read the returned sequences into"
            " an empty cache, or call cache.reset()"
        )


def check_hidden(cache: Cache | None, attention_mask: Tensor | None):
    """Raise ValueError unless the mask hides exactly those cached tokens that were pads when they were read.

    `attention_mask` [B, tokens], the cached ones first; None hides nothing. A compiled graph skips this check.
    """
    record = record_of(cache)  # a cache that no model has adopted yet holds no memory
    layer = None if record is None else record.layer
    if layer is None or not layer.is_initialized or is_torchdynamo_compiling():
        return
    if attention_mask is None and layer.hidden is None:
        return
    seen = int(layer.seen)
    if attention_mask is None:
        attention_mask = torch.ones(layer.batch_size, seen)
    shown = count_hidden(attention_mask[:, :seen], 0)
    known = torch.zeros_like(shown) if layer.hidden is None else layer.hidden[:, : shown.shape[1]].to(shown.device)
    if torch.equal(shown, known):
        return
    row = int((shown != known).any(1).nonzero()[0])
    hides, pads = int(shown[row, 0]), int(known[row, 0])
    raise ValueError(
        f"attention_mask hides {hides} of the {seen} tokens in the cache in row {row}, but it must hide exactly the"
        f" {pads} that were pads when they were read, because a recurrent state cannot forget a token. Pads are also"
        " the tokens that generate() fed after the end of a row. Correct the mask, or start from an empty cache"
    )
