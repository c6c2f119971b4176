"""Softmax attention over a window of the last tokens: linear time, a state of fixed size."""

from .naive import naive_window
from .op import chunk_window, window_state_shapes, window_step

__all__ = [
    "chunk_window",
    "naive_window",
    "window_state_shapes",
    "window_step",
]
