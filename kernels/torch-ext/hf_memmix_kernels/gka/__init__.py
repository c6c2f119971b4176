"""GKA: gated ridge regression at test time."""

from .naive import naive_gka
from .op import chunk_gka, gates_of_products, gates_of_token, gka_step

__all__ = ["chunk_gka", "gates_of_products", "gates_of_token", "gka_step", "naive_gka"]
