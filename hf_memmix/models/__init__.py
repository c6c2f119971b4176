"""Families that are trained from scratch: fixed backbones with the mixers of their papers."""
