"""The Triton kernels of the rowwise functions, one file per function, with its forward and its backward."""
