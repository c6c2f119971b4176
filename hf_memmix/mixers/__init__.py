"""The memory mixers. Importing this package registers all of them in `MIXERS`."""

import importlib
import warnings

from .base import ATTENTION, MIXERS, AttentionShape, MemoryMixer, register_mixer
from .beside_window import BesideWindow, new_layer
from .coffee import CoffeeMixer, CoffeeOptions
from .feed_forward import FeedForward
from .gka import GKAMixer, GKAOptions
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

_MOVED = ("AttentionWeights", "TensorFate")


def __getattr__(name: str):
    """Names that have moved to `hf_memmix.conversion`. This package imports it only here, on demand."""
    if name not in _MOVED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(f"{__name__}.{name} is now hf_memmix.conversion.{name}", DeprecationWarning, stacklevel=2)
    return getattr(importlib.import_module("hf_memmix.conversion"), name)
