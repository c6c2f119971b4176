"""Model families that are trained from scratch: a backbone of transformers with the mixers of a paper.

Importing this package registers their configurations; model classes are created, and modelling code is loaded, on
first use.
"""

from .coffee import CoffeeConfig
from .echo import EchoConfig
from .family import FAMILIES, FamilyConfig, family_of_model, register_family
from .gka import GKAConfig
from .gka_vision import GKAVisionConfig
from .lattice import LatticeConfig

__all__ = [
    "FAMILIES",
    "CoffeeConfig",
    "EchoConfig",
    "FamilyConfig",
    "GKAConfig",
    "GKAVisionConfig",
    "LatticeConfig",
    "register_family",
]


def __getattr__(name: str):
    config_class = family_of_model(name)
    if config_class is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    config_class._register_models()
    return globals()[name]
