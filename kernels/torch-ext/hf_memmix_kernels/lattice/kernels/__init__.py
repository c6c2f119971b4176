"""The Triton kernels of Lattice: `sequential` for every variant, `dual` for "enc" and "sim". README.md gives a reading order."""
