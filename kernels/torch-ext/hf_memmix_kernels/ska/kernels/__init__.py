"""The Triton kernels of SKA, one file per pass. `forward.py` is the place to start reading."""
