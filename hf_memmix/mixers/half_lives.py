"""The option `half_lives` of mixers whose memory decays: after how many tokens half of it is left, before training."""

import math

import torch
from torch import Tensor

from ..errors import UserError
from .options import checked

SHORTEST, LONGEST = 0.5, 1e6  # tokens


def half_lives():
    """The field of the option: None, or the shortest and the longest half-life in tokens."""
    return checked(lambda: None, _check)


def _check(ends: list | None):
    if ends is not None and not (len(ends) == 2 and SHORTEST <= ends[0] <= ends[1] <= LONGEST):
        raise UserError(
            f"must be the shortest and the longest half-life in tokens, {SHORTEST:g} to {LONGEST:g}, e.g. [64, 2048],"
            " or None"
        )


def log_spaced(ends: tuple[float, float], count: int) -> Tensor:
    """`count` numbers [count] from the first to the second, in equal ratios."""
    low, high = (math.log(x) for x in ends)
    return torch.linspace(low, high, count).exp()


def decay_rates(ends: tuple[float, float], count: int) -> Tensor:
    """-g [count], so that half of a memory that decays by e^g per token is left after half-lives in equal ratios."""
    return math.log(2) / log_spaced(ends, count)


def softplus_bias(rates: Tensor) -> Tensor:
    """The numbers whose softplus is `rates`."""
    return torch.log(torch.expm1(rates))
