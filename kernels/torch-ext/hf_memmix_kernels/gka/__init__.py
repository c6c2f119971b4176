"""GKA: gated ridge regression at test time."""

from .naive import naive_gka
from .op import chunk_gka, gka_step
from .op_gates import gates_of_products, gates_of_token

__all__ = ["chunk_gka", "gates_of_products", "gates_of_token", "gka_step", "naive_gka"]
