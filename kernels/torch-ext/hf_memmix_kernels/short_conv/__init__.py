"""Short depthwise causal convolution with a carried state."""

from .naive import naive_short_conv
from .op import short_conv, short_conv_step

__all__ = ["naive_short_conv", "short_conv", "short_conv_step"]
