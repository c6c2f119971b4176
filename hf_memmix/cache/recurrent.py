"""The cache of a model with mixers: states of fixed size of the mixers, keys and values of kept attention layers.

cache = RecurrentStateCache(model.config)
model(document_ids, past_key_values=cache)
cache.save_pretrained("document")                              # later, in another process:
cache = RecurrentStateCache.from_pretrained("document").expand(8)
"""

import copy
import os
from pathlib import Path

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, StaticCache, StaticLayer

from ..mixers import ATTENTION
from .file import load_cache, save_cache
from .identity import check_same_model
from .layer import RecurrentLayer, fix_addresses, memory_layers_of
from .prefetch import order_prefetch
from .record import note_model, record_of, static_length_of


class RecurrentStateCache(Cache):
    """Recurrent states of the memory layers, keys and values of the attention layers.

    Args:
        config: the model's configuration.
        max_cache_len: None for a dynamic cache; else the length of a static one, whose decode step can be compiled.
            Without attention layers there is no limit to the number of tokens.
        offloading, offload_only_non_sliding: as in transformers' caches. Recurrent states are not offloaded.

    Raises:
        ValueError: the configuration has no mixers, or `max_cache_len` is not an integer of at least 1.
    """

    def __init__(
        self,
        config,
        max_cache_len: int | None = None,
        offloading: bool = False,
        offload_only_non_sliding: bool = True,
    ):
        if not hasattr(config, "mixer_types"):
            raise ValueError(f"{type(config).__name__} has no mixer_types; a plain model takes a DynamicCache")
        if max_cache_len is not None and (type(max_cache_len) is not int or max_cache_len < 1):
            raise ValueError(
                f"max_cache_len is {max_cache_len!r}; give a number of tokens, at least 1, or None for a dynamic cache"
            )
        if max_cache_len is None:
            layers = DynamicCache(config=config).layers
        else:
            layers = StaticCache(config=config, max_cache_len=max_cache_len).layers
        replace_layers(layers, config, static=max_cache_len is not None)
        super().__init__(layers=layers, offloading=offloading, offload_only_non_sliding=offload_only_non_sliding)
        _adopt(self, config, max_cache_len)

    @property
    def config(self):
        """The configuration of the model to which the cache belongs."""
        return self.memmix.config

    @property
    def static_length(self) -> int | None:
        """Length of a static cache in tokens, None for a dynamic one."""
        return self.memmix.static_length

    @classmethod
    def from_cache(cls, cache: Cache, config) -> "RecurrentStateCache":
        """A cache with the layers of `cache`, where layers with mixers get a `RecurrentLayer`; they must be empty."""
        new = cls.__new__(cls)
        new.__dict__.update(vars(adopt_cache(cache, config)))
        return new

    @property
    def nbytes(self) -> int:
        """Bytes of all states, keys and values held now; 0 before the first token of a dynamic cache."""
        return sum(tensor.nbytes for tensor in self._tensors())

    def _tensors(self) -> list[Tensor]:
        """All states, keys and values held now."""
        tensors = []
        for layer in self.layers:
            if isinstance(layer, RecurrentLayer):
                tensors += layer.states.values()
            elif layer.is_initialized:
                tensors += [layer.keys, layer.values]
        return tensors

    def crop(self, tokens_to_remove: int):
        """Forget the last `-tokens_to_remove` tokens.

        Raises:
            ValueError: the number is positive, or the memory layers have not recorded that many tokens
                (`activate_past_recording`). No layer is changed then.
        """
        for layer in memory_layers_of(self):
            layer.check_crop(int(tokens_to_remove))
        super().crop(tokens_to_remove)

    def reset(self):
        """Forget everything; a static cache keeps its memory."""
        for layer in self.layers:
            if isinstance(layer, DynamicLayer):
                # transformers 5.17 would fill the keys with zeros and still count them
                layer.keys, layer.values, layer.is_initialized = None, None, False
            layer.reset()

    def batch_repeat_interleave(self, repeats: int):
        """Put `repeats` copies of each row one after the other."""
        self._change_rows(lambda rows: rows.repeat_interleave(repeats, 0), "batch_repeat_interleave", repeats)

    def batch_select_indices(self, indices):
        """Keep the rows `indices`, in this order."""
        self._change_rows(lambda rows: rows[indices.to(rows.device)], "batch_select_indices", indices)

    def _change_rows(self, change, name: str, argument):
        for layer in self.layers:
            if not isinstance(layer, StaticLayer):
                getattr(layer, name)(argument)
            elif layer.is_initialized:  # the library's static layers cannot do it
                layer.keys, layer.values = change(layer.keys), change(layer.values)
                layer.batch_size = layer.keys.shape[0]
                fix_addresses(layer.keys, layer.values)

    def stop_past_recording(self):
        """Undo `activate_past_recording`: forget what was recorded and step in place again."""
        stop_past_recording(self)

    def expand(self, batch: int) -> "RecurrentStateCache":
        """A copy with the one sequence of this cache in `batch` rows; this cache is left as it is.

        Raises:
            ValueError: the cache is empty or holds more than one sequence.
        """
        rows = self.batch_rows
        if rows != 1 or batch < 1:
            raise ValueError(f"expand({batch}) needs a cache with one sequence and batch >= 1; this one holds {rows}")
        # states that are part of a graph cannot be copied; they are shared until the next line replaces them
        graph = {id(tensor): tensor for tensor in self._tensors() if not tensor.is_leaf}
        new = copy.deepcopy(self, graph)
        new.batch_repeat_interleave(batch)
        return new

    @property
    def max_cache_len(self) -> int:
        """Length of a static cache, -1 for a dynamic one. PEFT asks for it before its prefix tuning is refused."""
        return -1 if self.static_length is None else self.static_length

    @property
    def batch_rows(self) -> int:
        """Number of sequences held; 0 before the first token."""
        for layer in self.layers:
            if isinstance(layer, RecurrentLayer):
                if layer.states:
                    return layer.batch_size
            elif layer.is_initialized:
                return layer.keys.shape[0]
        return 0

    def save_pretrained(self, save_directory: str | os.PathLike) -> Path:
        """Write the cache to `save_directory`/memory.safetensors, at once or not at all, and return the file's path.

        Raises:
            ValueError: the cache is empty, or a state is not finite.
        """
        return save_cache(self, save_directory)

    @classmethod
    def from_pretrained(cls, directory: str | os.PathLike, config=None, device=None) -> "RecurrentStateCache":
        """Read a cache that `save_pretrained` wrote.

        Args:
            directory: the folder.
            config: the configuration of the model that is to continue. Without it the one saved beside the states is
                used, and the model refuses the cache at its first forward if it is another model.
            device: where to; the CPU by default.

        Raises:
            ValueError: the file is missing, truncated, corrupt, of another model, or holds states that are not
                finite or that no layer leaves (`MemoryMixer.check_states`).
        """
        return load_cache(cls, directory, config, device)


def stop_past_recording(cache: Cache):
    """See `RecurrentStateCache.stop_past_recording`; also for an adopted cache of the library."""
    for layer in cache.layers:
        if isinstance(layer, RecurrentLayer):
            layer.stop_past_recording()
        elif hasattr(layer, "record_past"):
            layer.record_past = False


def cast_cache(cache: Cache, dtype: torch.dtype, state_dtypes: dict[int, dict[str, torch.dtype]]):
    """Cast keys and values to `dtype` and the states of memory layer i to `state_dtypes[i]`, by name."""
    for i, layer in enumerate(cache.layers):
        if isinstance(layer, RecurrentLayer):
            layer.cast(state_dtypes[i])
        elif layer.is_initialized:
            layer.dtype, layer.keys, layer.values = dtype, layer.keys.to(dtype), layer.values.to(dtype)
            if isinstance(layer, StaticLayer):
                fix_addresses(layer.keys, layer.values)


def replace_layers(layers: list, config, static: bool):
    """Put an empty `RecurrentLayer` at every memory layer of a list of cache layers, in place."""
    kinds = config.mixer_types
    # the largest length, because transformers 5.17 may take the size of the causal mask from a memory layer
    attention = [layer for layer, kind in zip(layers, kinds, strict=False) if kind == ATTENTION]
    lengths = [getattr(layer, "max_cache_len", -1) for layer in attention]
    mask_length = max(lengths) if lengths else None  # torch.compile cannot trace `default=None`
    for i, kind in enumerate(kinds):
        # with early-exit drafting, the cache has fewer layers than the configuration
        if kind == ATTENTION or i >= len(layers) or isinstance(layers[i], RecurrentLayer):
            continue
        old = layers[i]
        if getattr(old, "is_initialized", False) and int(old.get_seq_length()) > 0:
            raise ValueError(
                f"layer {i} of this cache holds keys and values, but the model has a {kind!r} memory there: the cache"
                " was filled by another model, or by PEFT's prefix tuning (use prompt tuning instead). Start from an"
                " empty cache"
            )
        layers[i] = RecurrentLayer(static=static, mask_length=mask_length)
        layers[i].record_past = getattr(old, "record_past", False)


def adopt_cache(cache: Cache | None, config) -> Cache | None:
    """Prepare an empty dynamic or static cache for the mixers of `config`, in place, and return it.

    This is done once per cache and configuration. Later calls with both return at once.

    Raises:
        ValueError: the cache is of another model, or of a kind that cannot hold recurrent states.
    """
    record = record_of(cache)
    if cache is None or (record is not None and record.config is config):
        return cache
    if record is not None:
        check_same_model(record.config, config)
    static_length = static_length_of(cache)  # before all layers that hold it may be replaced
    if not isinstance(cache, RecurrentStateCache):
        _replace_layers_of(cache, config)
    _adopt(cache, config, static_length)
    return cache


def _replace_layers_of(cache: Cache, config):
    """Put memory layers into a cache of the library, unless it has them."""
    if type(cache) not in (DynamicCache, StaticCache):
        raise ValueError(
            f"a {type(cache).__name__} cannot hold recurrent states; use a RecurrentStateCache, DynamicCache or"
            " StaticCache"
        )
    if cache.layer_class_to_replicate is not None:
        while len(cache.layers) < config.num_hidden_layers:
            cache.layers.append(cache.layer_class_to_replicate())
    kinds = config.mixer_types
    recurrent = [isinstance(layer, RecurrentLayer) for layer in cache.layers]
    if any(kind != ATTENTION and not done for kind, done in zip(kinds, recurrent, strict=False)):
        replace_layers(cache.layers, config, static=isinstance(cache, StaticCache))
    elif any(kind == ATTENTION and done for kind, done in zip(kinds, recurrent, strict=False)):
        raise ValueError(
            "this cache holds recurrent states at an attention layer, so it belongs to another model; start from an"
            " empty cache"
        )


def _adopt(cache: Cache, config, static_length: int | None):
    order_prefetch(cache, [layer for layer in cache.layers if not isinstance(layer, RecurrentLayer)])
    note_model(cache, config, static_length)
