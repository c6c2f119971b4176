"""The memory mixers. Importing this package registers all of them in `MIXERS`."""

from .attention_weights import AttentionWeights, TensorFate
from .base import ATTENTION, MIXERS, AttentionShape, MemoryMixer, MixerOptions, register_mixer
from .gka import GKAMixer, GKAOptions

__all__ = [
    "ATTENTION",
    "MIXERS",
    "AttentionShape",
    "AttentionWeights",
    "GKAMixer",
    "GKAOptions",
    "MemoryMixer",
    "MixerOptions",
    "TensorFate",
    "register_mixer",
]
