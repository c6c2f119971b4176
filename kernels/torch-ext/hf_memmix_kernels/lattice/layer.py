"""The decode step of a layer of Lattice on a CPU, see `_layer_step.py`."""

import torch
from torch import Tensor

from .._layer_step import Layer, native_layer
from .arguments import Gates
from .native_path import lattice_layer_native


def lattice_layer_step(layer: Layer, gates: Gates, state: Tensor, variant: str) -> Tensor | None:
    """The layer's output [1, 1, width] for one token, for slots of unit norm without l1.

    Args:
        layer: the token and the weights.
        gates: what the step sizes are computed from.
        state: [1, H, d, m] of `lattice_step`, contiguous, in float32, updated IN PLACE.
        variant: as in `chunk_lattice`.

    Returns:
        The output in x's dtype; None where native code cannot run, and where torch's threads are faster.
    """
    if state.dtype != torch.float32 or not state.is_contiguous():
        return None
    _, heads, dim, slots = state.shape
    found = native_layer("lattice", layer, (slots, dim), (*gates.weights, *gates.biases), (state,))
    if found is None or found.heads != heads or state.shape != (1, heads, dim, slots):
        return None
    expected = ((heads, layer.x.shape[-1]), (heads,))
    for tensors, shape in zip(gates[:2], expected, strict=True):
        if any(t is not None and t.shape != shape for t in tensors):
            return None
    if gates.weights[0] is None and gates.biases[0] is None:
        return None
    return lattice_layer_native(found, gates, state, variant)
