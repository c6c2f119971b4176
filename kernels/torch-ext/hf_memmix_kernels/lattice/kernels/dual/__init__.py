"""Kernels of the dual form of "enc" and "sim": a walk over chunks, then all windows in parallel."""
