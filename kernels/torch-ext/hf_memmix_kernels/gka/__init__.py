"""GKA: gated ridge regression at test time."""

from .naive import naive_gka
from .op import chunk_gka, gka_step

__all__ = ["chunk_gka", "gka_step", "naive_gka"]
