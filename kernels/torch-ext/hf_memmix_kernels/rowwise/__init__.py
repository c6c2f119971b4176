"""Functions that treat each token alone: rotary embedding and unit norm of heads, gated RMSNorm, and the product of a
SwiGLU.
"""

from .naive import naive_gated_norm, naive_gated_product, naive_unit_heads
from .op import gated_norm, gated_product, runs_kernels, unit_heads
from .torch_path import ACTIVATIONS, rotate

__all__ = [
    "ACTIVATIONS",
    "gated_norm",
    "gated_product",
    "naive_gated_norm",
    "naive_gated_product",
    "naive_unit_heads",
    "rotate",
    "runs_kernels",
    "unit_heads",
]
