"""Sizes that the fake kernels, the torch path and the Triton launches of Lattice must agree on; no Triton import."""

from torch import Tensor

# tokens between two states kept for backward
CHECKPOINT = 64
MAX_DIM = 128


def padded(n: int) -> int:
    """The next power of two, at least 16."""
    return max(16, 1 << (n - 1).bit_length())


def checkpoint_slots(batch: int, tokens: int, cu_seqlens: Tensor | None) -> int:
    """Rows of the checkpoints; packed sequence i starts at row start_i // CHECKPOINT + i."""
    if cu_seqlens is None:
        return batch * -(-tokens // CHECKPOINT)
    return tokens // CHECKPOINT + cu_seqlens.shape[0]
