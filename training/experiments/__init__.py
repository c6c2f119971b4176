"""Experiments on small models trained from scratch: one harness, equal parameters and tokens for all mixers."""
