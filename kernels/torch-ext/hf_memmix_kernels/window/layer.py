"""A whole layer's decode step of one sequence on a CPU, in one call of native code.

    q, k, v = W x;  norms and rotation of q and k;  the step of the window;  W_o y

In a small model, Python takes longer to start these functions one by one than they run. Where this function returns
None, the caller's own layers and `window_step` are the alternative.
"""

import torch
from torch import Tensor

from .._dispatch import native_library
from .._native import THREAD_WORK
from .._pages import check_step_states
from .._registration import needs_op
from .arguments import Layer, Sizes, States
from .native_path import window_layer_native


def runs_layer_step(x: Tensor) -> bool:
    """Whether `window_layer_step` may run; a caller asks before it collects the arguments."""
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or not x.is_cpu:
        return False
    return x.shape[:2] == (1, 1) and not torch.is_autocast_enabled("cpu")


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
    x, weights, biases, norms, cos, sin, _ = layer
    rows, dim = state[0].shape[2:]
    parameters = (*weights, *[t for t in (*biases, *norms) if t is not None])
    angles = () if cos is None else (cos, sin)
    if needs_op((x, *parameters, *angles, *state, sink_logits)) or not _fit(layer, rows, dim, sink_logits):
        return None
    dtype = x.dtype
    for t in (*parameters, *angles, *state[:2]):
        if t.dtype != dtype:
            return None
    for t in parameters:
        if not t.is_contiguous():
            return None
    if torch.get_num_threads() > 1 and sum([2 * t.numel() for t in weights]) >= THREAD_WORK:
        return None
    library = native_library("window", x, *parameters, *angles, *state, sink_logits)
    if library is None:
        return None
    slots = (1, sizes.sinks + sizes.window, rows, dim)
    check_step_states("window_layer_step", 1, state, (slots, slots, (1, rows)), None)
    return window_layer_native(library, layer, States(sink_logits, *state, None), sizes)


def _fit(layer: Layer, kv_heads: int, dim: int, sink_logits: Tensor | None) -> bool:
    """Whether the shapes of the parameters and angles fit together."""
    (hidden,), (q, k, v, o) = layer.x.shape[2:], layer.weights
    width = q.shape[0]
    shapes = (width, hidden), (kv_heads * dim, hidden), (kv_heads * dim, hidden), (o.shape[0], width)
    if width % (kv_heads * dim) or tuple([tuple(t.shape) for t in (q, k, v, o)]) != shapes:
        return False
    if sink_logits is not None and sink_logits.shape != (width // dim,):
        return False
    for weight, bias in zip(layer.weights, layer.biases, strict=True):
        if bias is not None and bias.shape != weight.shape[:1]:
            return False
    for norm in layer.norms:
        if norm is not None and norm.shape != (dim,):
            return False
    return layer.cos is None or (layer.cos.shape[:2] == (1, 1) and 0 < 2 * layer.cos.shape[-1] <= dim)
