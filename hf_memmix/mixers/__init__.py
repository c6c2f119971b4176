"""The memory mixers. Importing this package registers all of them in `MIXERS`."""

from .base import ATTENTION, MIXERS, AttentionShape, MemoryMixer, register_mixer
from .beside_window import BesideWindow, new_layer
from .coffee import CoffeeMixer, CoffeeOptions
from .feed_forward import FeedForward
from .gated_delta import GatedDeltaMixer, GatedDeltaOptions
from .gka import GKAMixer, GKAOptions
from .kda import KDAMixer, KDAOptions
from .koopman_mlp import KoopmanMLP
from .lattice import LatticeMixer, LatticeOptions
from .mamba2 import Mamba2Mixer, Mamba2Options
from .options import MixerOptions, mixer_options
from .ska import SKAMixer, SKAOptions
from .window import WindowMixer, WindowOptions

__all__ = [
    "ATTENTION",
    "MIXERS",
    "AttentionShape",
    "BesideWindow",
    "CoffeeMixer",
    "CoffeeOptions",
    "FeedForward",
    "GKAMixer",
    "GKAOptions",
    "GatedDeltaMixer",
    "GatedDeltaOptions",
    "KDAMixer",
    "KDAOptions",
    "KoopmanMLP",
    "LatticeMixer",
    "LatticeOptions",
    "Mamba2Mixer",
    "Mamba2Options",
    "MemoryMixer",
    "MixerOptions",
    "SKAMixer",
    "SKAOptions",
    "WindowMixer",
    "WindowOptions",
    "mixer_options",
    "new_layer",
    "register_mixer",
]
