"""Short depthwise causal convolution with a carried state."""

from .heads import Convolution
from .naive import naive_short_conv
from .op import prompt_heads, runs_prompt_heads, short_conv, short_conv_step, unit_heads_after_convolutions

__all__ = [
    "Convolution",
    "naive_short_conv",
    "prompt_heads",
    "runs_prompt_heads",
    "short_conv",
    "short_conv_step",
    "unit_heads_after_convolutions",
]
