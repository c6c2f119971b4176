"""The decode step of a layer of GKA on a CPU, see `_layer_step.py`."""

import torch
from torch import Tensor

from .._layer_step import Layer, native_layer
from .arguments import Gates, Solver, States
from .native_path import gka_layer_native


def gka_layer_step(layer: Layer, gates: Gates, state: tuple[Tensor, Tensor], solver: Solver) -> Tensor | None:
    """The layer's output [1, 1, width] for one token.

    Args:
        layer: the token and the weights.
        gates: as in `gates_of_token`, for the layer's x.
        state: H and U [1, H, D, D] of `gka_step`, contiguous, in float32, updated IN PLACE.
        solver: its iterations, ridge and scale.

    Returns:
        The output in x's dtype; None where native code cannot run, and where torch's threads are faster.
    """
    _, *weights, dt_bias, A_log, _ = gates
    weights, biases = weights[:3], weights[3:]
    for t in state:
        if t.dtype != torch.float32 or not t.is_contiguous():
            return None
    heads, dim = state[0].shape[1], state[0].shape[-1]
    found = native_layer("gka", layer, (dim, dim), tuple(gates[1:7]), (*state, dt_bias, A_log))
    if found is None or found.heads != heads or not state[0].shape == state[1].shape == (1, heads, dim, dim):
        return None
    if [None if t is None else t.shape for t in weights] != [(heads, layer.x.shape[-1])] * 3:
        return None
    for t in (*biases, dt_bias, A_log):
        if t is not None and t.shape != (heads,):
            return None
    return gka_layer_native(found, gates, States(*state), solver)
