"""Softmax attention over a window of the last tokens: linear time, a state of fixed size."""

from .arguments import Layer, Sizes
from .layer import runs_layer_step, window_layer_step
from .naive import naive_window
from .op import chunk_window, window_state_shapes, window_step

__all__ = [
    "Layer",
    "Sizes",
    "chunk_window",
    "naive_window",
    "runs_layer_step",
    "window_layer_step",
    "window_state_shapes",
    "window_step",
]
