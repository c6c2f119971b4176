"""The decode step of a layer with a window on a CPU, see `_layer_step.py`."""

from torch import Tensor

from .._layer_step import Layer, native_layer
from .._pages import check_step_states
from .arguments import Sizes, States
from .native_path import window_layer_native


def window_layer_step(
    layer: Layer, state: tuple[Tensor, Tensor, Tensor], sizes: Sizes, sink_logits: Tensor | None = None
) -> Tensor | None:
    """The layer's output [1, 1, width] for one token.

    Args:
        layer: the token and the weights.
        state: of one sequence as in `chunk_window`, contiguous, updated IN PLACE.
        sizes: options of the window.
        sink_logits: [H], see `chunk_window`.

    Returns:
        The output in x's dtype; None where native code cannot run, and where torch's threads are faster.

    Raises:
        ValueError: the state does not fit.
    """
    dim = state[0].shape[-1]
    found = native_layer("window", layer, (dim, dim), state[:2], (state[2], sink_logits))
    if found is None or (sink_logits is not None and sink_logits.shape != (found.heads,)):
        return None
    slots = (1, sizes.sinks + sizes.window, found.kv_heads, dim)
    check_step_states("window_layer_step", 1, state, (slots, slots, (1, found.kv_heads)), None)
    return window_layer_native(found, States(sink_logits, *state, None), sizes)
