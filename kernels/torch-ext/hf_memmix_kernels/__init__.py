"""Kernels of fixed-size memories: one folder an op, each with a naive float64 truth, a torch path and Triton kernels."""

from .gka import chunk_gka, gka_step, naive_gka

__all__ = ["chunk_gka", "gka_step", "naive_gka"]
