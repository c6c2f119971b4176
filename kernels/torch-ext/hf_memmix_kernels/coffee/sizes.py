"""Sizes on which the fake kernels and the Triton launches of COFFEE must agree."""

# tokens between two states that forward keeps for backward, and tokens whose states backward holds in registers
CHECKPOINT = 16
GROUP = 8


def padded_states(n: int) -> int:
    """The next power of two."""
    return 1 << (n - 1).bit_length()
