"""The decode step of a layer of Mamba-2 on a CPU, in one call of native code, see `_layer_step.py`."""

import torch
from torch import Tensor

from .._layer_step import layer_library
from .arguments import Mamba2
from .native_path import mamba2_layer_native


def mamba2_layer_step(layer: Mamba2, groups: int) -> Tensor | None:
    """The layer's output [1, 1, width] for one token, in x's dtype; None where native code cannot run, and where
    torch's threads are faster.

    Args:
        layer: the token, the weights and the states; x contiguous.
        groups: G.
    """
    x, weights, biases, taps, conv_bias, past, norm, *others = layer[:11]
    A_log, D, dt_bias, state = others
    if state.dtype != torch.float32 or not state.is_contiguous():
        return None
    library = layer_library("gla", (x, *weights, *biases, taps, conv_bias, past, norm), tuple(others), weights)
    if library is None:
        return None
    _, heads, N, P = state.shape
    features, channels, (width, count) = heads * P, heads * P + 2 * groups * N, (weights[1].shape[0], taps.shape[-1])
    rows = features + channels + heads
    expected = (
        (rows, x.shape[-1]), (width, features), (rows,), (width,), (channels, 1, count), (channels,),
        (1, channels, count - 1), (features,), *[(heads,)] * 3, (1, heads, N, P),
    )  # fmt: skip
    found = (*weights, *biases, taps, conv_bias, past, norm, A_log, D, dt_bias, state)
    if heads % groups or any(t is not None and t.shape != e for t, e in zip(found, expected, strict=True)):
        return None
    return mamba2_layer_native(library, layer, groups)
