"""The decode step of a layer of SKA on a CPU, see `_layer_step.py`."""

import torch
from torch import Tensor

from .._layer_step import Layer, native_layer
from .arguments import Estimate, State
from .native_path import ska_layer_native
from .state import state_shapes


def ska_layer_step(
    layer: Layer, factors: tuple[Tensor, Tensor], state: State, chunk_size: int, estimate: Estimate
) -> Tensor | None:
    """The layer's output [1, 1, width] for one token.

    Args:
        layer: the token and the weights.
        factors: gamma and eta [H].
        state: as in `ska_step`, contiguous, in float32, updated IN PLACE.
        chunk_size, estimate: as in `ska_step`.

    Returns:
        The output in x's dtype; None where native code cannot run, and where torch's threads are faster.

    Raises:
        ValueError: statistics that are not positive definite.
    """
    for t in state:
        if t.dtype != torch.float32 or not t.is_contiguous():
            return None
    rank, values = state.operator.shape[-2:]
    found = native_layer("ska", layer, (rank, values), (), (*factors, *state))
    if found is None or tuple([t.shape for t in state]) != state_shapes(1, found.kv_heads, rank, values):
        return None
    if [t.shape for t in factors] != [(found.heads,)] * 2:
        return None
    return ska_layer_native(found, factors, state, chunk_size, estimate)
