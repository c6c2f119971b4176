"""From a pretrained transformer to a model with recurrent memory: extract attention, convert, compare.

The names below are imported on first use: modules that need no torch, e.g. `saving`, are then imported quickly.
"""

import importlib

_HOMES = {
    "FAMILIES": "families",
    "AttentionWeights": "attention_weights",
    "ConversionReport": "conversion_report",
    "LayerChoice": "layer_choice",
    "TensorFate": "attention_weights",
    "compare_models": "compare",
    "convert_model": "convert",
    "extract_attention": "families",
    "layers_to_keep": "layer_choice",
    "load_delta_layer": "delta_layers",
    "load_model": "loading",
    "mixer_types_of": "mixer_layout",
    "report": "compare",
    "save_student": "convert",
    "starts": "from_attention",
}
_OWN_NAMES = {"report": "compare_models"}  # in its module

__all__ = [  # noqa: F822, found by __getattr__
    "FAMILIES",
    "AttentionWeights",
    "ConversionReport",
    "LayerChoice",
    "TensorFate",
    "convert_model",
    "extract_attention",
    "layers_to_keep",
    "load_delta_layer",
    "load_model",
    "mixer_types_of",
    "report",
    "save_student",
    "starts",
]


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), _OWN_NAMES.get(name, name))
    globals()[name] = value
    return value


def __dir__():
    return sorted({*globals(), *__all__})
