"""The native path, for a CPU: one token and a layer around it, by native.cpp; torch estimates the operator.

Sequences, and an estimate at every token, take the torch path.
"""

import ctypes
import struct

from torch import Tensor

from .._layer_step import NativeLayer
from .._native import INTEGER, POINTER, address, changed, dense, empty, function, pages_of
from .._pages import read_pages, write_pages
from .arguments import Estimate, Refresh, State, Tokens
from .torch_path import estimate_again

ROWS, FIELDS = struct.Struct("11P10q"), struct.Struct("7P2q")


def ska_step_native(library: ctypes.CDLL, x: Tokens, pools: State, refresh: Refresh, estimate: Estimate) -> Tensor:
    """See `torch_path.ska_step_torch`."""
    q, k, v, gain = [dense(t) for t in x]
    (batch, _, heads, rank), (kv_heads, values) = q.shape, v.shape[2:]
    indices = pages_of(refresh.state_indices, len(pools.position))
    o = empty(batch, 1, heads, values)
    tensors = (q, k, v, gain, o, indices, *pools)
    strides, sizes = [t.stride(0) for t in pools], (batch, heads, kv_heads, rank, values)
    function(library, "ska_step", (POINTER,))(ROWS.pack(*[address(t) or 0 for t in tensors], *strides, *sizes))
    changed(*pools)
    (position,) = read_pages(indices, pools.position)
    due = position >= refresh.chunk_size
    if due.any():
        rows = State(*read_pages(indices, *pools))
        estimate_again(rows, due, estimate, refuse=indices is None)
        write_pages(indices, pools, rows)
    return o.to(x.q.dtype)


def ska_layer_native(
    layer: NativeLayer, factors: tuple[Tensor, Tensor], state: State, chunk_size: int, estimate: Estimate
) -> Tensor:
    """See `layer.ska_layer_step`."""
    factors = [dense(t) for t in factors]
    fields = FIELDS.pack(*[t.data_ptr() for t in (*factors, *state)], layer.kv_heads, estimate.power)
    function(layer.library, "ska_layer", (POINTER, POINTER, INTEGER))(layer.fields, fields, layer.in_bf16)
    changed(*state)
    if state.position[0, 0].item() >= chunk_size:  # that of all heads
        estimate_again(state, state.position >= chunk_size, estimate)
    return layer.out
