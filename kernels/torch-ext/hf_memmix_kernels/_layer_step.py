"""A whole layer's decode step of one sequence on a CPU, in one call of native code: what lies around the memory.

    q, k, v = W x;  norms;  short convolutions;  rotation and norm 1 of q and k;  the memory's step;  gate;  W_o y

In a small model, Python takes longer to start these functions one by one than they run. The `layer.py` of an op adds
its memory. Where its function returns None, the caller's own layers and the op's step are the alternative. `layer.h`
has the native code.
"""

import ctypes
import functools
import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ._dispatch import native_library
from ._native import ACTIVATIONS, THREAD_WORK
from ._registration import needs_op


class Layer(NamedTuple):
    """The token of a decode step before its projections, and what the layer around the memory computes.

    Attributes:
        x: the layer's input [1, 1, hidden].
        weights, biases: of the projections of q, k, v and of the output, as in nn.Linear; a bias may be None, and the
            weights of q and k may both be. If they are the same, k has the heads of q, else those of v.
        norms: weights of the RMSNorms of q and k, [K] for each head or [heads K] over all, and of the output's heads
            [D]; None for none.
        cos, sin: of the rotation, see `rowwise.rotate`: the first r = `pairs` numbers of [1, 1, d], 2 r <= K; None for
            no rotation.
        eps: of the norms.
        taps, past: weights [C, 1, K] and states [1, C, K - 1], updated IN PLACE, of the short convolutions of q, k and
            v; None for none.
        silu: whether the activation after a convolution is SiLU or none.
        unit_eps: q and k then get norm 1, see `rowwise.unit_heads`; 0 for no such norm.
        gate: weights of the output gate: [heads D, hidden] after None, or [heads D, rank] after [rank, hidden]; two
            None for no gate. `gate_bias` [heads D] may be None.
        activation: of the gate, one of `_native.ACTIVATIONS`.
    """

    x: Tensor
    weights: Sequence[Tensor | None]
    biases: Sequence[Tensor | None]
    norms: Sequence[Tensor | None]
    cos: Tensor | None
    sin: Tensor | None
    pairs: int
    eps: float
    taps: Sequence[Tensor | None] = (None,) * 3
    past: Sequence[Tensor | None] = (None,) * 3
    silu: bool = False
    unit_eps: float = 0.0
    gate: Sequence[Tensor | None] = (None,) * 2
    gate_bias: Tensor | None = None
    activation: str | None = None


class NativeLayer(NamedTuple):
    """What the native code of an op gets of a layer, and `out`, which it fills; the layer's tensors stay alive."""

    library: ctypes.CDLL
    fields: bytes
    out: Tensor
    heads: int
    kv_heads: int
    in_bf16: bool


class _Sizes(NamedTuple):
    """Of the native code's fields."""

    hidden: int
    width: int
    key_dim: int
    dim: int
    pairs: int
    rank: int
    tap_count: int
    rows: int
    keys: int
    values: int
    outputs: int
    q_norm: int
    k_norm: int


# fields of native code as bytes: a ctypes.Structure with arrays takes several times as long to make
_FIELDS = struct.Struct("24P15q2f")


def runs_layer_step(op: str, x: Tensor) -> bool:
    """Whether a layer's step by the native code of `op` may run; a caller asks before it collects the arguments."""
    # is_compiling first: torch.compile would make a guard of every other condition
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or not x.is_cpu:
        return False
    if x.shape[:2] != (1, 1) or torch.is_autocast_enabled("cpu"):
        return False
    return native_library(op, x) is not None


def native_layer(
    op: str, layer: Layer, dims: tuple[int, int], more: tuple[Tensor | None, ...], others: tuple[Tensor | None, ...]
) -> NativeLayer | None:
    """The layer for the native code of `op`; None where it cannot run, and where torch's threads are faster.

    Args:
        layer: x, cos and sin contiguous, as `contiguous` returns them.
        dims: K, of a head of q and k, and D, of one of v.
        more, others: parameters and states that the op reads beside the layer, in x's dtype and in other dtypes; see
            `layer_library`.
    """
    x, weights, biases, norms, cos, sin, pairs, eps, taps, past, silu, unit_eps, gate, gate_bias, activation = layer
    tensors = (x, *weights, *biases, *norms, *taps, *past, cos, sin, *gate, gate_bias)
    library = layer_library(op, tensors + more, others, weights)
    if library is None:
        return None
    shapes = tuple([None if t is None else t.shape for t in tensors])
    sizes = _sizes(shapes, dims, pairs, weights[0] is weights[1])
    if sizes is None:
        return None
    out = x.new_empty(1, 1, sizes.width)
    fields = _FIELDS.pack(
        *[0 if t is None else t.data_ptr() for t in tensors], out.data_ptr(), *sizes[:7], silu,
        ACTIVATIONS.index(activation), *sizes[7:], eps, unit_eps,
    )  # fmt: skip
    heads, kv_heads = sizes.outputs // sizes.dim, sizes.values // sizes.dim
    return NativeLayer(library, fields, out, heads, kv_heads, x.dtype == torch.bfloat16)


def layer_library(
    op: str, tensors: tuple[Tensor | None, ...], others: tuple[Tensor | None, ...], weights: Sequence[Tensor | None]
) -> ctypes.CDLL | None:
    """The native code of `op` for a layer with these tensors; None where it cannot run, and where torch's threads are
    faster.

    Args:
        tensors: what it reads and writes in x's dtype, x first; it takes only contiguous ones.
        others: those in other dtypes; here it is only checked that they are plain tensors on the CPU.
        weights: of the projections, most of the work.
    """
    dtype, given = tensors[0].dtype, tensors + others
    for t in tensors:
        if t is not None and (t.dtype != dtype or not t.is_contiguous()):
            return None
    if needs_op(given):
        return None
    if torch.get_num_threads() > 1 and sum([2 * t.numel() for t in weights if t is not None]) >= THREAD_WORK:
        return None
    return native_library(op, *given)


@functools.lru_cache(maxsize=256)  # a decode step asks again and again, and to compare shapes takes microseconds
def _sizes(shapes: tuple[torch.Size | None, ...], dims: tuple[int, int], pairs: int, shared: bool) -> _Sizes | None:
    """From the shapes of a layer's tensors, in the order of the native code; None if they do not fit together."""
    (x, *weights), biases, norms, taps, past = shapes[:5], shapes[5:9], shapes[9:12], shapes[12:15], shapes[15:18]
    angles, (down, up, gate_bias) = shapes[18:20], shapes[20:]
    (q, k, v, o), hidden, (key_dim, dim) = weights, x[-1], dims
    if v is None or o is None or (q is None) != (k is None):
        return None
    rows, values, width, rank = 0 if q is None else q[0], v[0], o[0], hidden if down is None else down[0]
    outputs = values if q is None else rows // key_dim * dim
    keys = rows if shared else values // dim * key_dim
    counts, size = (rows, keys, values), max([0 if t is None else t[-1] for t in taps])
    expected = (
        *[(count, hidden) for count in counts], (width, outputs), *[(count,) for count in counts], (width,),
        *[norm if norm == (key_dim,) else (count,) for norm, count in zip(norms[:2], counts[:2], strict=True)], (dim,),
        *[(count, 1, size) for count in counts], *[(1, count, size - 1) for count in counts],
        (rank, hidden), (outputs, rank), (outputs,),
    )  # fmt: skip
    found = (*weights, *biases, *norms, *taps, *past, down, up, gate_bias)
    if (
        rows % key_dim
        or values % dim
        or not values
        or outputs % values
        or any(a not in (None, b) for a, b in zip(found, expected, strict=True))
    ):
        return None
    if [t is None for t in taps] != [t is None for t in past] or (up is None and (down or gate_bias)):
        return None
    turned = [angle for angle in angles if angle is not None]
    if len(turned) != (2 if pairs else 0) or 2 * pairs > key_dim:
        return None
    if any(len(angle) != 3 or angle[:2] != (1, 1) or angle[2] < pairs for angle in turned):
        return None
    q_norm, k_norm, _ = [0 if norm is None else norm[0] for norm in norms]
    rank = 0 if down is None else rank
    return _Sizes(hidden, width, *dims, pairs, rank, size, rows, keys, values, outputs, q_norm, k_norm)
