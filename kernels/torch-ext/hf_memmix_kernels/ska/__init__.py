"""SKA: Spectral Koopman Attention, regression on a fixed-size memory with a power filter."""

from .naive import cg_lift, naive_ska
from .op import check_statistics as check_ska_state
from .op import chunk_ska
from .op import state_shapes as ska_state_shapes

__all__ = ["cg_lift", "check_ska_state", "chunk_ska", "naive_ska", "ska_state_shapes"]
