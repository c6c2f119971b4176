"""SKA: Spectral Koopman Attention, a regression on a memory of fixed size, with a power filter."""

from .naive import cg_lift, naive_ska
from .op import chunk_ska, ska_step
from .state import check_statistics as check_ska_state
from .state import per_token_state as ska_per_token_state
from .state import state_shapes as ska_state_shapes

__all__ = [
    "cg_lift",
    "check_ska_state",
    "chunk_ska",
    "naive_ska",
    "ska_per_token_state",
    "ska_state_shapes",
    "ska_step",
]
