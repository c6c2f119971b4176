"""Functions that treat each token alone: rotary embedding and unit norm of heads, gated RMSNorm, the product of a
SwiGLU, step sizes and decays, and a loss over the vocabulary.
"""

from .naive import naive_decay, naive_forward_kl, naive_gated_norm, naive_gated_product, naive_rotate, naive_unit_heads
from .op import decay, forward_kl_, gated_norm, gated_product, rms_norm, rotate, runs_kernels, unit_heads
from .torch_path import ACTIVATIONS

__all__ = [
    "ACTIVATIONS",
    "decay",
    "forward_kl_",
    "gated_norm",
    "gated_product",
    "naive_decay",
    "naive_forward_kl",
    "naive_gated_norm",
    "naive_gated_product",
    "naive_rotate",
    "naive_unit_heads",
    "rms_norm",
    "rotate",
    "runs_kernels",
    "unit_heads",
]
