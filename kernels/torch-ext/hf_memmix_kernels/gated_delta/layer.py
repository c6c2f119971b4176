"""The decode step of a layer of the gated delta rule on a CPU, see `_layer_step.py`."""

import torch
from torch import Tensor

from .._layer_step import Layer, native_layer
from .arguments import Gates
from .native_path import gated_delta_layer_native


def gated_delta_layer_step(layer: Layer, gates: Gates, state: Tensor, *, scale: float | None = None) -> Tensor | None:
    """The layer's output [1, 1, width] for one token.

    Args:
        layer: the token and the weights.
        gates: what the decays and the write strength are computed from.
        state: [1, H, K, K] of `gated_delta_step`, contiguous, in float32, updated IN PLACE.
        scale: as in `chunk_gated_delta`.

    Returns:
        The output in x's dtype; None where native code cannot run, and where torch's threads are faster.
    """
    heads, dim = state.shape[1], state.shape[-1]
    down, up, beta, dt_bias, A_log, _ = gates
    if up is None or beta is None or state.dtype != torch.float32 or not state.is_contiguous():
        return None
    found = native_layer("gated_delta", layer, (dim, dim), (down, up, beta), (state, dt_bias, A_log))
    if found is None or found.heads != heads:
        return None
    hidden, rates = layer.x.shape[-1], dt_bias.shape[0]
    rank = hidden if down is None else down.shape[0]
    expected = (None if down is None else (rank, hidden)), (rates, rank), (heads, hidden), (rates,), (heads,)
    if tuple([None if t is None else t.shape for t in gates[:5]]) != expected or rates not in (heads, heads * dim):
        return None
    if state.shape != (1, heads, dim, dim):
        return None
    return gated_delta_layer_native(found, gates, state, dim**-0.5 if scale is None else scale)
