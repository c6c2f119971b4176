"""Converts a model folder without loading the model: one decoder layer at a time is in memory.

Tensors outside the converted attention go from file to file in small pieces, byte for byte. Each converted attention
is read, turned into its mixer by the code that also converts in memory, and written. Peak memory is that of the
libraries, one layer and one piece. The result has the same bytes as a conversion in memory that is saved.
"""

from hf_memmix.conversion.streaming.matching import NotStreamable
from hf_memmix.conversion.streaming.stream import ConversionStream
from hf_memmix.conversion.streaming.trained import TrainedMixers

__all__ = ["ConversionStream", "NotStreamable", "TrainedMixers"]
