"""COFFEE (context from feedback): a recurrence whose gate depends on its own state.

`chunk_coffee` reads a sequence; `coffee_step` advances a state by one token.
"""

from .naive import naive_coffee
from .op import check_coffee, chunk_coffee, coffee_step

__all__ = ["check_coffee", "chunk_coffee", "coffee_step", "naive_coffee"]
