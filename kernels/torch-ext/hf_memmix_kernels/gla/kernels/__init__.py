"""The Triton kernels of gla, one file per pass. `forward.py` is the place to start reading."""
