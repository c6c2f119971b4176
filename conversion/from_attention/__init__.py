"""The start of each mixer: how it is initialised from a softmax attention. Importing this registers all starts."""

from hf_memmix.conversion.from_attention import coffee, gka, lattice, mamba2, ska  # noqa: F401, register themselves
from hf_memmix.conversion.from_attention.registry import STARTS, Start, start_of, starts

__all__ = ["STARTS", "Start", "start_of", "starts"]
