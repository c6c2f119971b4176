"""The native path of a layer's decode step, by native.cpp; sequences and single steps are in `_native_memory.py`."""

import struct

from torch import Tensor

from .._layer_step import NativeLayer
from .._native import INTEGER, POINTER, address, changed, dense, function
from .arguments import Gates

FIELDS = struct.Struct("6P3q2f")


def gated_delta_layer_native(layer: NativeLayer, gates: Gates, state: Tensor, scale: float) -> Tensor:
    """See `layer.gated_delta_layer_step`."""
    down, up, beta, dt_bias, A_log, strength = gates
    dt_bias, A_log = dense(dt_bias), dense(A_log)
    fields = FIELDS.pack(
        address(down) or 0, up.data_ptr(), beta.data_ptr(), dt_bias.data_ptr(), A_log.data_ptr(), state.data_ptr(),
        layer.kv_heads, dt_bias.shape[0] // layer.heads, 0 if down is None else down.shape[0], strength, scale,
    )  # fmt: skip
    function(layer.library, "gated_delta_layer", (POINTER, POINTER, INTEGER))(layer.fields, fields, layer.in_bf16)
    changed(state)
    return layer.out
