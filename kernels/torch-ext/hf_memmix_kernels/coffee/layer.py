"""The decode step of a layer of COFFEE on a CPU, see `_layer_step.py`."""

import torch
from torch import Tensor

from .._layer_step import Layer, native_layer
from .arguments import Parameters
from .native_path import coffee_layer_native


def coffee_layer_step(layer: Layer, parameters: Parameters, state: Tensor) -> Tensor | None:
    """The layer's output [1, 1, width] for one token, with the feedback "sigmoid".

    Args:
        layer: the token and the weights, with u in the place of v, one head of D features, and no q and k.
        parameters: of the states.
        state: [1, D, n] of `coffee_step`, contiguous, in float32, updated IN PLACE.

    Returns:
        The output in x's dtype; None where native code cannot run, and where torch's threads are faster.
    """
    if state.dtype != torch.float32 or not state.is_contiguous():
        return None
    features = state.shape[1]
    found = native_layer("coffee", layer, (1, features), (), (*parameters, state))
    if found is None or found.heads != 1 or len(state) != 1:
        return None
    if any(t is not None and t.shape != state.shape[1:] for t in parameters):
        return None
    return coffee_layer_native(found, parameters, state)
