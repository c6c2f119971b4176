"""`memmix plan`: which training stages fit a GPU, and what they cost.

shapes.py          what of a model is trained, frozen and shared, counted on the meta device
memory.py          bytes of a stage: arithmetic on these shapes
speed.py           hours, from measured tokens per second
stage_settings.py  the smallest change of the settings with which each stage fits
"""

CONTEXT = 2**29  # bytes of a GPU that the CUDA context and the libraries take
