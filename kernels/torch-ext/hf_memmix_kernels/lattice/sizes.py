"""Sizes that the fake kernels, the torch path and the Triton launches of Lattice share. Does not import Triton."""

import torch
from torch import Tensor

from .._chunks import checkpoint_slots
from .._device import compiled, device_of, dot_precision

# tokens between two states kept for backward
CHECKPOINT = 64
# slots per program of the dual form's walks
WALKED = 16
MAX_DIM = 128
# after a decay stronger than e^-20, float32 holds nothing of the old direction
STRONGEST_DECAY = -20.0
# bytes of shared memory of a GPU that has too little for the operands of windows by levels in TF32
SMALL_SHARED = 128 * 1024


def padded(n: int) -> int:
    """The smallest power of two that is at least n, and at least 16."""
    return max(16, 1 << (n - 1).bit_length())


def precision(dtype: torch.dtype) -> str:
    """The `input_precision` of `tl.dot` for products over a window, by the dtype of the inputs."""
    return "ieee" if dtype == torch.float64 else dot_precision("tf32x3" if dtype == torch.float32 else "tf32")


def levels_precision(v: Tensor) -> str:
    """As `precision`, for windows by levels: products in three parts keep their operands in registers."""
    form = precision(v.dtype)
    return dot_precision("tf32x3") if form == "tf32" and device_of(v).shared <= SMALL_SHARED else form


def window_precision(v: Tensor) -> str:
    """As `precision`, for kernels that also support "pairs" of bfloat16 (kernels/dual/windows.py)."""
    form = precision(v.dtype)
    return ("pairs" if compiled(v) else "ieee") if form == "tf32" else form


def runs_dual(variant: str, project: bool, l1: float) -> bool:
    """Whether the dual form applies: h does not depend on the state, and an update is linear in it given p = S^T h."""
    return variant in ("enc", "sim") and project and not l1


def keeps_h(variant: str, project: bool, l1: float) -> bool:
    """Whether forward also keeps h and p of every token, as `kernels/sequential/dec_backward.py` needs them."""
    return variant == "dec" and project and not l1


def kept_sizes(v: Tensor, state: Tensor, cu_seqlens: Tensor | None, rule: tuple[str, bool, float]) -> list[int]:
    """Numbers of elements that forward keeps for backward: tiles of states, then h and p of all tokens if
    `keeps_h`.
    """
    _, H, d, m = state.shape
    slots = checkpoint_slots(v.shape[0], v.shape[1], cu_seqlens, CHECKPOINT)
    tokens = v.shape[0] * v.shape[1] * H if keeps_h(*rule) else 0
    return [slots * H * padded(m) * padded(d), tokens * d, tokens * m]


def dual_sizes(v: Tensor, state: Tensor, cu_seqlens: Tensor | None) -> list[int]:
    """Numbers of elements that the dual form keeps for backward: states before windows, final states, p of windows."""
    N, H, d, m = state.shape
    windows, slots = checkpoint_slots(v.shape[0], v.shape[1], cu_seqlens, CHECKPOINT), -(-m // WALKED) * WALKED
    return [windows * H * m * d, N * H * m * d, windows * H * CHECKPOINT * slots]
