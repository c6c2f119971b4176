"""The names of all model classes that vLLM may find in a `config.json` of ours, and what it loads for them."""

from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from ..._transformers import native_class_names
from ...configuration_memmix import MemMixConfig, model_makers
from ...models import FAMILIES
from . import packing  # noqa: F401, notes the number of threads
from .versions import installed_version, refusal_of_version

PACKAGE = "hf_memmix.serving.vllm"
CLASSES = {
    AutoModelForCausalLM: f"{PACKAGE}.model:MemMixForCausalLM",
    AutoModelForSequenceClassification: f"{PACKAGE}.model:MemMixForSequenceClassification",
}
# the heads of the families that are trained from scratch
HEADS = {AutoModelForCausalLM: "ForCausalLM", AutoModelForSequenceClassification: "ForSequenceClassification"}


def register():
    """See `hf_memmix.serving.vllm.register`."""
    refusal = refusal_of_version(installed_version() or "of an unknown version")
    if refusal is not None:
        _refuse(refusal)
        return
    from vllm import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    from .config import MemMixVerifyAndUpdate

    for auto_class, path in CLASSES.items():
        for name in model_names(auto_class):
            if MODELS_CONFIG_MAP.get(name) is not MemMixVerifyAndUpdate:
                ModelRegistry.register_model(name, path)
                MODELS_CONFIG_MAP[name] = MemMixVerifyAndUpdate


def model_names(auto_class: type) -> set[str]:
    """The names of our model classes for an Auto class: of all backbones, and of the families trained from scratch."""
    generated = {MemMixConfig._model_name(native) for native in native_class_names(auto_class).values()}
    return generated | {family + HEADS[auto_class] for family in FAMILIES}


def _refuse(line: str):
    """Raise `line` as soon as vLLM reads the configuration of one of our models, and for no other model."""

    def refuse(config_class):
        raise ValueError(line)

    model_makers.insert(0, refuse)
