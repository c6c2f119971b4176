"""The table of the baselines' language models."""

from hf_memmix.training.experiments.common.report import language_section


def language(results: dict) -> str:
    """The table of language models with their distance from the transformer."""
    return language_section(results, "transformer", {})
