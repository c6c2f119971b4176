"""The memory mixers. Importing this package registers all of them in `MIXERS`."""

from .attention_weights import AttentionWeights, TensorFate
from .base import ATTENTION, MIXERS, AttentionShape, MemoryMixer, register_mixer
from .coffee import CoffeeMixer, CoffeeOptions
from .feed_forward import FeedForward
from .gka import GKAMixer, GKAOptions
from .koopman_mlp import KoopmanMLP
from .lattice import LatticeMixer, LatticeOptions
from .mamba2 import Mamba2Mixer, Mamba2Options
from .options import MixerOptions, mixer_options
from .ska import SKAMixer, SKAOptions

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
    "KoopmanMLP",
    "LatticeMixer",
    "LatticeOptions",
    "Mamba2Mixer",
    "Mamba2Options",
    "MemoryMixer",
    "MixerOptions",
    "SKAMixer",
    "SKAOptions",
    "TensorFate",
    "mixer_options",
    "register_mixer",
]
