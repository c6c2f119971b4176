"""Functions before and after a recurrence that treat each token alone: rotary embedding and unit norm of heads, and
gated RMSNorm.
"""

from .naive import naive_gated_norm, naive_unit_heads
from .op import gated_norm, unit_heads
from .torch_path import ACTIVATIONS, rotate

__all__ = ["ACTIVATIONS", "gated_norm", "naive_gated_norm", "naive_unit_heads", "rotate", "unit_heads"]
