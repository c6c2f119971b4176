from .naive import naive_gated_norm, naive_unit_heads
from .op import gated_norm, unit_heads

__all__ = ["gated_norm", "naive_gated_norm", "naive_unit_heads", "unit_heads"]
