"""Sizes on which the fake kernels and the Triton launches of COFFEE must agree, and the rule for `method="auto"`."""

# tokens between two states kept for backward, and tokens whose states backward holds in registers
CHECKPOINT = 8
GROUP = 8
# where multiple shooting takes the place of the scan on a GPU, by the grid of the README: the scan of fewer tokens is
# over before the iterations are; of more lanes some do not settle, and one is enough for the scan to run after all
SHOOTING_TOKENS = 65_536
SHOOTING_LANES = 256


def padded_states(n: int) -> int:
    """The next power of two."""
    return 1 << (n - 1).bit_length()


def shooting_chunk(tokens: int) -> int:
    """Tokens of a chunk of multiple shooting: more make an iteration longer, and iterations fewer."""
    return min(4096, max(256, 4 << ((tokens - 1).bit_length() // 2)))


def coffee_method(batch: int, tokens: int, features: int, states: int, cuda: bool = True) -> str:
    """Whether `chunk_coffee(method="auto")` scans token by token or shoots: "scan" or "shooting".

    The scan takes as long as one lane needs for all tokens while lanes (batch * features * states) are few; shooting
    fills the GPU with chunks of time instead. DEER is never the fastest.
    """
    lanes = batch * features * states
    return "shooting" if cuda and tokens >= SHOOTING_TOKENS and lanes <= SHOOTING_LANES else "scan"
