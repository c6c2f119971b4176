"""`align` without the whole teacher in memory: its decoder layers pass through the device one after the other.

The hidden states of the training tokens between two layers lie in files. While a layer of the teacher is on the
device, its mixer is trained on the layer's inputs, by the code and in the order of data of `align` in memory.
"""

from hf_memmix.training.streaming.align import align_by_streaming

__all__ = ["align_by_streaming"]
