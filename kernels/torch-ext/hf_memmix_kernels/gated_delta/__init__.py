"""The gated delta rule, with one decay per head or one per key channel (Kimi Delta Attention)."""

from .naive import naive_gated_delta
from .op import chunk_gated_delta, gated_delta_step

__all__ = ["chunk_gated_delta", "gated_delta_step", "naive_gated_delta"]
