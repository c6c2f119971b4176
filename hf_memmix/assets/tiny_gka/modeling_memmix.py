"""Loads this checkpoint's classes from the package hf_memmix: `pip install .` in its checkout."""

from hf_memmix import MemMixConfig, MemMixForCausalLM, MemMixForSequenceClassification, MemMixModel  # noqa: F401
