"""What one sequence costs in memory: the states of memory layers, the keys and values of the others."""

from dataclasses import dataclass
from math import prod

import torch
from transformers import PreTrainedConfig

from ..backbones import window_of
from ..mixers import ATTENTION, MemoryMixer, new_layer
from ..mixers.base import AttentionShape


@dataclass(frozen=True)
class Footprint:
    """Bytes of one sequence on one device.

    Args:
        config, dtype: of the model; the dtype is that of its activations.
        states: bytes of each memory layer, by its index; they are the same at every length.
        kept: indices of the layers that have kept their attention.
        key_dtype: of their keys and values; None for `dtype`.
    """

    config: PreTrainedConfig
    dtype: torch.dtype
    states: dict[int, int]
    kept: tuple[int, ...]
    key_dtype: torch.dtype | None = None

    @classmethod
    def of(cls, config: PreTrainedConfig, dtype: torch.dtype, key_dtype: torch.dtype | None = None) -> "Footprint":
        """The footprint of a model of transformers or of a memmix model, with activations of `dtype`."""
        kinds = getattr(config, "mixer_types", None) or [ATTENTION] * config.num_hidden_layers
        with torch.device("meta"):
            states = {i: state_bytes(new_layer(k, config, i), dtype) for i, k in enumerate(kinds) if k != ATTENTION}
        return cls(config, dtype, states, tuple(i for i, kind in enumerate(kinds) if kind == ATTENTION), key_dtype)

    def state_bytes(self) -> int:
        """Of all memory layers."""
        return sum(self.states.values())

    def key_bytes(self, length: int) -> int:
        """Of the keys and values of `length` tokens in all layers with attention."""
        return sum(layer_kv_bytes(self.config, i, length, self.key_dtype or self.dtype) for i in self.kept)

    def total(self, length: int) -> int:
        """Of a sequence of `length` tokens."""
        return self.state_bytes() + self.key_bytes(length)


def state_bytes(mixer: MemoryMixer, dtype: torch.dtype) -> int:
    """Bytes of the states that one sequence has in a mixer."""
    return sum(prod(shape) * state_dtype.itemsize for shape, state_dtype in mixer.state_shapes(1, dtype).values())


def layer_kv_bytes(config: PreTrainedConfig, layer: int, length: int, dtype: torch.dtype) -> int:
    """Bytes of the keys and values of `length` tokens in one attention layer; a sliding window bounds them."""
    if window := window_of(config, layer):
        length = min(length, window - 1)  # the newest token needs one less behind it
    shape = AttentionShape.of(config)
    return 2 * length * shape.kv_heads * shape.head_dim * dtype.itemsize
