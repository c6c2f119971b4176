"""Short depthwise causal convolution with a carried state."""

from .naive import naive_short_conv
from .native_path import Convolution, unit_heads_after_convolutions
from .op import short_conv, short_conv_step

__all__ = [
    "Convolution",
    "naive_short_conv",
    "short_conv",
    "short_conv_step",
    "unit_heads_after_convolutions",
]
