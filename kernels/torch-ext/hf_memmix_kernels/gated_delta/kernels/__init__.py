"""The Triton kernels of the gated delta rule, one file per pass. `pairs.py` is the place to start reading."""
