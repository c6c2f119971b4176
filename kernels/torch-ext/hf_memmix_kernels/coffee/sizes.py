"""Sizes on which the fake kernels and the Triton launches of COFFEE must agree, and the rule for `method="auto"`."""

# tokens between two states that forward keeps for backward, and tokens whose states backward holds in registers
CHECKPOINT = 16
GROUP = 8
# multiple shooting replaces the scan on a GPU from this number of tokens on, up to this number of lanes (grid in
# README.md). With fewer tokens the scan is faster. With more lanes some do not converge, and then the scan runs as
# well
SHOOTING_TOKENS = 65_536
SHOOTING_LANES = 256


def padded_states(n: int) -> int:
    """The next power of two."""
    return 1 << (n - 1).bit_length()


def shooting_chunk(tokens: int) -> int:
    """Tokens per chunk of multiple shooting. Longer chunks make an iteration slower and need fewer iterations."""
    return min(4096, max(256, 4 << ((tokens - 1).bit_length() // 2)))


def coffee_method(batch: int, tokens: int, features: int, states: int, cuda: bool = True) -> str:
    """The method that `chunk_coffee(method="auto")` takes: "scan" or "shooting".

    While there are few lanes (batch * features * states), the scan takes as long as one lane needs for all tokens.
    Shooting then fills the GPU with chunks of time instead.
    """
    lanes = batch * features * states
    return "shooting" if cuda and tokens >= SHOOTING_TOKENS and lanes <= SHOOTING_LANES else "scan"
