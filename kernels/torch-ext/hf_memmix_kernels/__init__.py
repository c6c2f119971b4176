"""Kernels of fixed-size memories: one folder an op, each with a float64 truth, a torch path and Triton kernels."""

from .gka import chunk_gka, gka_step, naive_gka
from .gla import chunk_gla, gla_step, naive_gla
from .short_conv import naive_short_conv, short_conv, short_conv_step

__all__ = [
    "chunk_gka",
    "chunk_gla",
    "gka_step",
    "gla_step",
    "naive_gka",
    "naive_gla",
    "naive_short_conv",
    "short_conv",
    "short_conv_step",
]
