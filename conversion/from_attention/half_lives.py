"""How long the memory of a converted layer lasts at the start, and how loud it is.

Of N tokens that a head remembers, all but a few have nothing to do with a query, and what they add to the output grows
as sqrt(N). So the share of a head falls as the root of its half-life, once that is long.
"""

import torch
from torch import Tensor, nn

from hf_memmix.mixers.half_lives import decay_rates, log_spaced, softplus_bias

BESIDE_WINDOW = (64.0, 2048.0)  # tokens, log-spaced over the heads: the window holds the near past
LOUD = 8.0  # half-lives in tokens up to this one have the whole share; measured: training/experiments/smollm2


def start_half_lives(mixer: nn.Module, default: tuple[float, float]) -> tuple[float, float]:
    """The shortest and the longest half-life of a mixer in tokens: its option, or those that suit its place."""
    if mixer.options.half_lives is not None:
        return tuple(mixer.options.half_lives)
    return BESIDE_WINDOW if mixer.options.local_window else default


def share_of_heads(mixer: nn.Module, default: tuple[float, float]) -> Tensor:
    """By how much [H] the output of a head is smaller than with the half-lives `default`, whose gate was measured.
    Beside a window all heads have the whole share, since m is small there.
    """
    half_lives = start_half_lives(mixer, default)
    if mixer.options.local_window or half_lives == default:
        return torch.ones(mixer.heads)
    return (LOUD / log_spaced(half_lives, mixer.heads)).sqrt().clamp_max(1)


@torch.no_grad()
def start_decay(mixer: nn.Module, half_lives: tuple[float, float], weights: nn.Linear) -> None:
    """Give the heads of a mixer with `A_log` and `dt_bias` constant half-lives in tokens, log-spaced from the first to
    the second. `weights`: the layer from which a decay depends on the token.
    """
    weights.weight.zero_()
    mixer.A_log.zero_()
    bias = softplus_bias(decay_rates(half_lives, mixer.heads))
    mixer.dt_bias.copy_(bias.repeat_interleave(len(mixer.dt_bias) // mixer.heads))


def inverse_silu(y: Tensor) -> Tensor:
    """x > 0 with silu(x) = y, for y in (0, 1]."""
    x = 2 * y.double()
    for _ in range(20):  # Newton's steps from above, where silu is convex
        gate = x.sigmoid()
        x = x - (x * gate - y) / (gate * (1 + x * (1 - gate)))
    return x.to(y.dtype)
