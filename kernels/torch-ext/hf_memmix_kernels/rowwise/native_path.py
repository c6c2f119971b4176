"""The native path, for a CPU and without gradients: the functions by native.cpp."""

import ctypes
import functools
import math

import torch
from torch import Tensor

from .._native import ACTIVATIONS, INTEGER, POINTER, REAL, address, dense, function, over_rows

HEADS = (*[POINTER] * 4, *[INTEGER] * 3, POINTER, *[INTEGER] * 3)
DECAY = (*[POINTER] * 5, INTEGER, *[REAL] * 3, INTEGER, INTEGER)
NORM = (*[POINTER] * 4, *[INTEGER] * 2, REAL, *[INTEGER] * 2, REAL, REAL, *[INTEGER] * 3)
WORK = 20  # operations per number, about


def runs_native(x: Tensor, *others: Tensor | None) -> bool:
    """Whether native code can compute a function of these tensors: no gradient."""
    return x.numel() > 0 and not (
        torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, *others))
    )


def heads_native(
    library: ctypes.CDLL, x: Tensor, cos: Tensor | None, sin: Tensor | None, eps: float | None = None
) -> Tensor:
    """See `op.unit_heads`; without eps `op.rotate`."""
    x = x.contiguous()
    if cos is not None:
        cos, sin = cos.contiguous(), sin.contiguous()
    y, (batch, length, heads, dim) = torch.empty_like(x), x.shape
    call = functools.partial(
        function(library, "heads", HEADS), x.data_ptr(), address(cos), address(sin), y.data_ptr(), heads, dim,
        0 if cos is None else cos.shape[-1], None if eps is None else ctypes.byref(REAL(eps)),
        x.dtype == torch.bfloat16,
    )  # fmt: skip
    over_rows(call, batch * length, WORK * x.numel())
    return y


def gated_norm_native(
    library: ctypes.CDLL,
    y: Tensor,
    gate: Tensor | None,
    weight: Tensor,
    eps: float,
    activation: str | None,
    norm_first: bool,
    limit: float | None,
    gate_limit: float | None,
) -> Tensor:
    """See `op.gated_norm`."""
    y, gate, weight = y.contiguous(), None if gate is None else gate.contiguous(), weight.contiguous()
    out, dim = torch.empty_like(y), y.shape[-1]
    call = functools.partial(
        function(library, "gated_norm", NORM), y.data_ptr(), address(gate), weight.data_ptr(), out.data_ptr(), dim,
        weight.numel() // dim, eps, ACTIVATIONS.index(activation), norm_first, math.inf if limit is None else limit,
        math.inf if gate_limit is None else gate_limit, y.dtype == torch.bfloat16,
    )  # fmt: skip
    over_rows(call, y.numel() // dim, WORK * y.numel())
    return out


def decay_native(
    library: ctypes.CDLL,
    x: Tensor,
    bias: Tensor,
    A_log: Tensor,
    limit: float | None,
    smallest: float | None,
    largest: float | None,
) -> tuple[Tensor, Tensor]:
    """See `op.decay`."""
    x, bias, A_log = dense(x), dense(bias), dense(A_log)
    dt, g = torch.empty_like(x), torch.empty_like(x)
    call = functools.partial(
        function(library, "decay", DECAY), x.data_ptr(), bias.data_ptr(), A_log.data_ptr(), dt.data_ptr(),
        g.data_ptr(), x.shape[-1], math.inf if limit is None else limit, 0 if smallest is None else smallest,
        math.inf if largest is None else largest,
    )  # fmt: skip
    over_rows(call, x.numel() // x.shape[-1], WORK * x.numel())
    return dt, g
