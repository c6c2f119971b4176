"""The Triton kernels of COFFEE, one file per pass. Read `tiles.py` (how states lie in threads), then `forward.py`."""
