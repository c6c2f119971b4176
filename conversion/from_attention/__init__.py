"""How each mixer is initialised from a softmax attention. Importing this package registers the functions."""

from hf_memmix.conversion.from_attention import (  # noqa: F401  for the registration
    coffee,
    gated_delta,
    gka,
    lattice,
    mamba2,
    ska,
    window,
)
from hf_memmix.conversion.from_attention.registry import STARTS, Start, start_of, starts

__all__ = ["STARTS", "Start", "start_of", "starts"]
