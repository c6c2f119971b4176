"""What a model notes in a cache that it uses: one record under `cache.memmix`, also in a cache of the library."""

from typing import Any, NamedTuple

import torch
from transformers.cache_utils import Cache, StaticCache

from .layer import RecurrentLayer, memory_layers_of


class ModelRecord(NamedTuple):
    """The model to which a cache belongs."""

    config: Any  # its configuration
    layer: RecurrentLayer | None  # one of the memory layers, for checks of the cache's rows
    static_length: int | None  # the length of a static cache in tokens
    dtype: torch.dtype | None = None  # of the model that filled the cache last


def record_of(cache: Cache | None) -> ModelRecord | None:
    """The record in a cache; None before a model has adopted it."""
    return getattr(cache, "memmix", None)


def static_length_of(cache: Cache | None) -> int | None:
    """The length of a static cache in tokens; None for a dynamic cache."""
    if (record := record_of(cache)) is not None:
        return record.static_length
    return max(layer.max_cache_len for layer in cache.layers) if isinstance(cache, StaticCache) else None


def note_model(cache: Cache, config, static_length: int | None):
    """Note that a cache belongs to the model of a configuration."""
    layers, record = memory_layers_of(cache), record_of(cache)
    dtype = None if record is None else record.dtype
    cache.memmix = ModelRecord(config, layers[0] if layers else None, static_length, dtype)


def note_dtype(cache: Cache, dtype: torch.dtype | None):
    """Note the dtype of the model that fills an adopted cache."""
    record = cache.memmix
    cache.memmix = ModelRecord(record.config, record.layer, record.static_length, dtype)
