"""Where each mixer starts that takes over a softmax attention. Importing this package registers all of them."""

from hf_memmix.conversion.from_attention import coffee, gka, lattice, mamba2, ska  # noqa: F401, register themselves
from hf_memmix.conversion.from_attention.registry import STARTS, Start, start_of, starts

__all__ = ["STARTS", "Start", "start_of", "starts"]
