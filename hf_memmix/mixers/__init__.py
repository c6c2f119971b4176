"""The memory mixers. Importing this package registers all of them in `MIXERS`."""

from .attention_weights import AttentionWeights, TensorFate
from .base import ATTENTION, MIXERS, AttentionShape, MemoryMixer, MixerOptions, register_mixer
from .coffee import CoffeeMixer, CoffeeOptions
from .feed_forward import FeedForward
from .gka import GKAMixer, GKAOptions
from .lattice import LatticeMixer, LatticeOptions

__all__ = [
    "ATTENTION",
    "MIXERS",
    "AttentionShape",
    "AttentionWeights",
    "CoffeeMixer",
    "CoffeeOptions",
    "FeedForward",
    "GKAMixer",
    "GKAOptions",
    "LatticeMixer",
    "LatticeOptions",
    "MemoryMixer",
    "MixerOptions",
    "TensorFate",
    "register_mixer",
]
