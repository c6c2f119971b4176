"""The Triton kernels of GKA, one file per pass. Read `forward.py`, then `solve.py`, then `backward.py`."""
