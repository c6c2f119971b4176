"""Linear attention with one scalar decay per head."""

from .naive import naive_gla
from .op import chunk_gla, gla_step

__all__ = ["chunk_gla", "gla_step", "naive_gla"]
