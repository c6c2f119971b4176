"""SKA: Spectral Koopman Attention, regression on a fixed-size memory with a power filter."""

from .naive import cg_lift, naive_ska
from .op import check_statistics as check_ska_state
from .op import chunk_ska
from .op import state_shapes as ska_state_shapes
from .prefix import prefix_ska
from .recurrent import per_token_state as ska_per_token_state
from .recurrent import ska_step

__all__ = [
    "cg_lift",
    "check_ska_state",
    "chunk_ska",
    "naive_ska",
    "prefix_ska",
    "ska_per_token_state",
    "ska_state_shapes",
    "ska_step",
]
