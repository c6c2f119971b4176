"""Which decoder families vLLM can serve with mixers."""

from ..backbones import backbone_of, family_name
from ..mixers import ATTENTION


def refusal_of_serving(config) -> str | None:
    """Why vLLM cannot serve the model of a memmix configuration, in one line; None if it can."""
    reason = backbone_of(config).no_serving
    if reason is not None:
        return f"{family_name(config)!r} cannot be served by vLLM: {reason}"
    if config.mixer_types is not None and set(config.mixer_types) == {ATTENTION}:
        return (
            "the model has no memory mixer: all of mixer_types are attention. Serve the transformer that it was made"
            " from; vLLM knows it without hf_memmix"
        )
    return None
