"""Lattice: an orthogonal state recurrence. The memory is a set of slots that store only what is new to them."""

from .naive import naive_lattice
from .op import check_lattice, chunk_lattice, lattice_step

__all__ = [
    "check_lattice",
    "chunk_lattice",
    "lattice_step",
    "naive_lattice",
]
