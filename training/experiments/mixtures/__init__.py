"""Mixtures of several mixers against single ones, from the same aligned mixers."""
