"""Experiments on small models that are trained from scratch, with equal parameters and tokens for all mixers."""
