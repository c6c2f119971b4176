"""The Triton kernels of Lattice: `sequential` for every variant, `dual` for "enc" and "sim".

The README of the op gives an order in which to read them.
"""
