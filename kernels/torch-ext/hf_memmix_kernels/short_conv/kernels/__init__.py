"""The Triton kernels of short_conv, one file per pass. `forward.py` is the place to start reading."""
