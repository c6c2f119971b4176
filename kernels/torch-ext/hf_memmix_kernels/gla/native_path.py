"""The native path of a layer's decode step, by native.cpp; sequences and single steps are in `_native_memory.py`."""

import ctypes
import struct

import torch
from torch import Tensor

from .._native import INTEGER, POINTER, address, changed, dense, function
from .arguments import Mamba2

FIELDS = struct.Struct("14P7q5f")


def mamba2_layer_native(library: ctypes.CDLL, layer: Mamba2, groups: int) -> Tensor:
    """See `layer.mamba2_layer_step`."""
    x, weights, biases, taps, conv_bias, past, norm, *rates, state, eps, limits = layer
    width, rates = weights[1].shape[0], [dense(t) for t in rates]
    out = x.new_empty(1, 1, width)
    tensors = (x, *weights, *biases, taps, conv_bias, norm, past, out, *rates, state)
    _, heads, N, P = state.shape
    fields = FIELDS.pack(
        *[address(t) or 0 for t in tensors], x.shape[-1], width, heads, groups, N, P, taps.shape[-1], eps, *limits
    )
    function(library, "mamba2_layer", (POINTER, INTEGER))(fields, x.dtype == torch.bfloat16)
    changed(past, state)
    return out
