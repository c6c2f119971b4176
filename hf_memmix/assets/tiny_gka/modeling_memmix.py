"""Loads this checkpoint's classes from the package hf_memmix: `pip install .` in its checkout."""

from hf_memmix import (  # noqa: F401
    MemMixConfig,
    MemMixForCausalLM,
    MemMixForQuestionAnswering,
    MemMixForSequenceClassification,
    MemMixForTokenClassification,
    MemMixModel,
)
