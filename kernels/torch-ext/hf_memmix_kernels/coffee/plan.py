"""Sizes that the COFFEE op's fake kernels and its Triton launches must agree on; no Triton import."""

from torch import Tensor

# tokens between two states kept for backward, and tokens whose states backward holds in registers
CHECKPOINT = 8
GROUP = 8
# where DEER is expected to beat the scan on a GPU, by the floors of the README: not measured. At 65,536 tokens in 128
# lanes, w, u ~ N(0, 1), Newton did not converge on an H200, and the attempt cost 40 % on top of the scan
DEER_TOKENS = 262_144
DEER_LANES = 1024


def padded_states(n: int) -> int:
    """The next power of two."""
    return 1 << (n - 1).bit_length()


def checkpoint_slots(batch: int, tokens: int, cu_seqlens: Tensor | None) -> int:
    """Rows of the checkpoints; packed sequence i starts at row start_i // CHECKPOINT + i."""
    if cu_seqlens is None:
        return batch * -(-tokens // CHECKPOINT)
    return tokens // CHECKPOINT + cu_seqlens.shape[0]


def coffee_method(batch: int, tokens: int, features: int, states: int, cuda: bool = True) -> str:
    """Whether `coffee(method="auto")` scans token by token or runs DEER.

    The scan takes as long as one lane needs for all tokens while lanes (batch * features * states) are few, and DEER
    spends iterations * lanes * tokens: it should win on a GPU for long inputs with few lanes.
    """
    lanes = batch * features * states
    return "deer" if cuda and tokens >= DEER_TOKENS and lanes <= DEER_LANES else "scan"
