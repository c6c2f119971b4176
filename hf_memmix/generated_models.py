"""Makes model classes from a native class and one of this package, and registers them with the Auto classes."""

import sys

from transformers import AutoModelForCausalLM

from ._generation_hooks import check_forward
from ._model_hooks import check_models
from ._transformers import (
    copy_tensor_renames,
    list_as_language_model,
    model_class_of,
    native_class_names,
)
from .configuration_memmix import MemMixConfig, config_class_for


def register(config_class: type[MemMixConfig], kinds: tuple[type, ...]):
    """Make the model classes of a configuration class and register them with the Auto classes, once.

    Args:
        config_class: its `_models_module` is the module to which the classes are added.
        kinds: base classes of this package, which stand before the native class; each has an `_auto_class_for`.
    """
    backbone, module = config_class._backbone_class, sys.modules[config_class._models_module]
    for kind in kinds:
        native = model_class_of(backbone, kind._auto_class_for)
        if native is None:
            continue
        name = config_class._model_name(native.__name__)
        if name in vars(module):
            continue
        check_models()
        check_forward(native, cache=kind._takes_cache)
        namespace = {
            "__module__": module.__name__,
            "__doc__": f"`{native.__name__}` with memory mixers; see `{kind.__name__}`.",
            "config_class": config_class,
            # the library's heads for questions have another name, under which weights of a causal LM are not found
            "base_model_prefix": model_class_of(backbone).base_model_prefix,
        }
        model_class = type(name, (kind, native), namespace)
        setattr(module, name, model_class)
        kind._auto_class_for.register(config_class, model_class)
        copy_tensor_renames(native, backbone.model_type, model_class)
        if kind._auto_class_for is AutoModelForCausalLM:
            list_as_language_model(model_class)


def config_class_of_model(name: str, kinds: tuple[type, ...]) -> type[MemMixConfig] | None:
    """The configuration class that belongs to the name of a generated model class; None for any other name."""
    for kind in kinds:
        for model_type, native_name in native_class_names(kind._auto_class_for).items():
            if name == MemMixConfig._model_name(native_name):
                return config_class_for(model_type)
    return None
