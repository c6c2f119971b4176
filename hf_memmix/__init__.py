"""Token mixers with a memory of fixed size, which replace attention in models of transformers.

Importing this package registers its model types with AutoConfig, AutoModel, AutoModelForCausalLM, the Auto classes for
sequence and token classification and question answering, and AutoModelForImageClassification. It imports the mixers,
but not `modeling_memmix`, the modelling code of transformers or the Triton kernels: these are imported on first use.

Raises ImportError if torch or transformers is outside the tested range (`versions.py`).
"""

import importlib

from .versions import check_versions

check_versions()  # before anything of the two libraries is used

from . import library_messages  # noqa: F401, before transformers imports torchao and bitsandbytes
from .configuration_memmix import MemMixConfig, lora_target_modules, memmix_config, model_makers
from .mixers import MIXERS, register_mixer
from .models import CoffeeConfig, EchoConfig, GKAConfig, GKAVisionConfig, LatticeConfig

_LAZY = {
    "GKAVisionForImageClassification": ".models.gka_vision_model",
    "GKAVisionModel": ".models.gka_vision_model",
    "MemMixForCausalLM": ".modeling_memmix",
    "MemMixForQuestionAnswering": ".modeling_memmix",
    "MemMixForSequenceClassification": ".modeling_memmix",
    "MemMixForTokenClassification": ".modeling_memmix",
    "MemMixModel": ".modeling_memmix",
    "PromptGraph": ".prompt_graph",
    "RecurrentStateCache": ".cache",
    "no_weight_decay_names": ".mixers.weight_decay",
    "ops": ".ops",
    "spare_from_decay": ".mixers.weight_decay",
}

__all__ = [
    "MIXERS",
    "CoffeeConfig",
    "CoffeeForCausalLM",
    "CoffeeForQuestionAnswering",
    "CoffeeForSequenceClassification",
    "CoffeeForTokenClassification",
    "CoffeeModel",
    "EchoConfig",
    "EchoForCausalLM",
    "EchoForQuestionAnswering",
    "EchoForSequenceClassification",
    "EchoForTokenClassification",
    "EchoModel",
    "GKAConfig",
    "GKAForCausalLM",
    "GKAForQuestionAnswering",
    "GKAForSequenceClassification",
    "GKAForTokenClassification",
    "GKAModel",
    "GKAVisionConfig",
    "GKAVisionForImageClassification",
    "GKAVisionModel",
    "LatticeConfig",
    "LatticeForCausalLM",
    "LatticeForQuestionAnswering",
    "LatticeForSequenceClassification",
    "LatticeForTokenClassification",
    "LatticeModel",
    "MemMixConfig",
    "MemMixForCausalLM",
    "MemMixForQuestionAnswering",
    "MemMixForSequenceClassification",
    "MemMixForTokenClassification",
    "MemMixModel",
    "PromptGraph",
    "RecurrentStateCache",
    "lora_target_modules",
    "memmix_config",
    "no_weight_decay_names",
    "ops",
    "register_mixer",
    "spare_from_decay",
]
__version__ = "0.1.0"


def _make_models(config_class: type):
    """Make the model classes of a configuration class; loads the modelling code on first use."""
    if issubclass(config_class, GKAVisionConfig):
        importlib.import_module(".models.gka_vision_model", __name__)
        return
    importlib.import_module(".modeling_memmix", __name__).register_generated_models(config_class)


model_makers.append(_make_models)


def __getattr__(name: str):
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(_LAZY.get(name, ".models"), __name__)  # the models of families are created there
    value = module if name == "ops" else getattr(module, name)
    globals()[name] = value
    return value


def __dir__():
    return sorted({*globals(), *__all__})
