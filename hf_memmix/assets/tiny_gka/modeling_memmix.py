"""Loads this checkpoint's classes from the package hf_memmix: `pip install hf-memmix`."""

from hf_memmix import MemMixConfig, MemMixForCausalLM, MemMixForSequenceClassification, MemMixModel  # noqa: F401
