"""Kernels that go through time token by token, for every variant, and the backward pass of "dec"."""
