"""Operators (ops) with states of fixed size, one folder per op: float64 reference, torch path and Triton kernels."""

from .coffee import (
    check_coffee,
    chunk_coffee,
    coffee_step,
    naive_coffee,
)
from .gated_delta import chunk_gated_delta, gated_delta_step, naive_gated_delta
from .gka import chunk_gka, gka_step, naive_gka
from .gla import chunk_gla, gla_step, naive_gla
from .lattice import (
    check_lattice,
    chunk_lattice,
    lattice_step,
    naive_lattice,
)
from .short_conv import naive_short_conv, short_conv, short_conv_step
from .ska import (
    cg_lift,
    check_ska_state,
    chunk_ska,
    naive_ska,
    ska_per_token_state,
    ska_state_shapes,
    ska_step,
)
from .window import chunk_window, naive_window, window_step

__all__ = [
    "cg_lift",
    "check_coffee",
    "check_lattice",
    "check_ska_state",
    "chunk_coffee",
    "chunk_gated_delta",
    "chunk_gka",
    "chunk_gla",
    "chunk_lattice",
    "chunk_ska",
    "chunk_window",
    "coffee_step",
    "gated_delta_step",
    "gka_step",
    "gla_step",
    "lattice_step",
    "naive_coffee",
    "naive_gated_delta",
    "naive_gka",
    "naive_gla",
    "naive_lattice",
    "naive_short_conv",
    "naive_ska",
    "naive_window",
    "short_conv",
    "short_conv_step",
    "ska_per_token_state",
    "ska_state_shapes",
    "ska_step",
    "window_step",
]
