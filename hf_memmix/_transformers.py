"""All uses of private methods, attributes and tables of transformers, which may change in any release.

Only these modules use them, too: `_model_hooks`, for methods that model classes override, `_generation_hooks`, for
those of generate(), and `hf_memmix.training._trainer_hooks`, for those of the Trainer. A comment here explains why
each one is needed, and a row in tests/core/test_door.py fails if the library renames it or changes its arguments.

Each one has the same name, arguments and meaning from transformers 5.17 to 5.24, unless a comment names the releases.
"""

import re
import sys
from contextlib import contextmanager

import torch
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_QUESTION_ANSWERING_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    MODEL_MAPPING,
    AttentionInterface,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    masking_utils,
)

# names of activation functions, for clear errors about unknown ones
from transformers.activations import ACT2FN

# renames and merges of checkpoint tensors, which the library finds by the name of the model class
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    get_model_conversion_mapping,
    register_checkpoint_conversion_mapping,
)

# the names and shapes under which `save_pretrained` writes the tensors of a model, and the way back for some of them
from transformers.core_model_loading import convert_and_load_state_dict_in_model, revert_weight_conversion
from transformers.modeling_utils import LoadStateDictConfig

# class names of the library's models by model type, which can be read without loading modelling code
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
    MODEL_MAPPING_NAMES,
)

# the modules that quantisers leave alone if the user names none: the output projection and what is tied to it
from transformers.quantizers.base import get_keys_to_not_convert as unquantized_by_default
from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

# also the imported names that other modules use
__all__ = [
    "ACT2FN",
    "CONFIG_MAPPING_NAMES",
    "IDLE_FIELDS",
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "MODEL_MAPPING_NAMES",
    "attention_computed_by",
    "attention_implementation",
    "change_class",
    "copy_tensor_renames",
    "drop_unmatched_rules",
    "execution_device",
    "fill_one",
    "fp32_patterns_of",
    "ignored_when_loading",
    "keep_in_fp32",
    "load_generation_config",
    "load_under_other_names",
    "loaded_in_fp32",
    "masks_without_looking",
    "model_class_of",
    "name_in_plan",
    "native_class",
    "native_class_names",
    "same_forward",
    "saved_tensors",
    "stores_under_other_names",
    "tensor_parallel_mesh",
    "tensor_parallel_size",
    "unquantized_by_default",
]

_MODELS = {
    AutoModel: (MODEL_MAPPING, MODEL_MAPPING_NAMES),
    AutoModelForCausalLM: (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
    AutoModelForSequenceClassification: (
        MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
        MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    ),
    AutoModelForTokenClassification: (
        MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
        MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
    ),
    AutoModelForQuestionAnswering: (
        MODEL_FOR_QUESTION_ANSWERING_MAPPING,
        MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES,
    ),
}
# the field of a configuration that names the folder or repository from which a model's weights were loaded
NAME_OF_WEIGHTS = "_name_or_path"
# fields of a configuration that do not change what a model computes, or that are written again at every save
IDLE_FIELDS = (
    NAME_OF_WEIGHTS,
    "architectures",
    "auto_map",
    "dtype",
    "torch_dtype",
    "transformers_version",
    "use_cache",
)


# ---- tables

_OURS = ("hf_memmix.", "memmix")  # begin the keys of our own classes in a table of the library


def model_class_of(config_class: type, auto_class: type = AutoModelForCausalLM) -> type | None:
    """The model class that an Auto class builds from a configuration class, or None. Includes registered classes."""
    models, _ = _MODELS[auto_class]
    return models.get(config_class, None)


def native_class_names(auto_class: type) -> dict[str, str]:
    """Class names of the library's models by model type, without loading them."""
    _, names = _MODELS[auto_class]
    return {key: name for key, name in names.items() if isinstance(name, str) and not key.startswith(_OURS)}


def list_as_language_model(model_class: type):
    """List a class under its own name and under its model type.

    Under `label_smoothing_factor` the Trainer shifts the labels for the class names in this table only, and lm_eval
    warns that a model type is no language model if the table does not have it.
    """
    name = model_class.__name__
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[_OURS[0] + name] = name
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.setdefault(model_class.config_class.model_type, name)


def copy_tensor_renames(native: type, model_type: str, model_class: type):
    """Give a model class the renames and merges of checkpoint tensors that the native class has."""
    mapping = get_checkpoint_conversion_mapping(native.__name__)
    if mapping is None:
        mapping = get_checkpoint_conversion_mapping(model_type)
    if mapping:
        register_checkpoint_conversion_mapping(model_class.__name__, mapping, overwrite=True)


def stores_under_other_names(model: nn.Module) -> bool:
    """Whether the library renames, merges or splits tensors between a model and its checkpoints, e.g. experts."""
    return bool(get_model_conversion_mapping(model, add_legacy=False))


def saved_tensors(model: nn.Module, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of a model's state dict as `save_pretrained` writes them: names, shapes and order. Also on "meta"."""
    return revert_weight_conversion(model, tensors)


def load_under_other_names(model: nn.Module, tensors: dict[str, torch.Tensor], device: torch.device):
    """Fill parameters of a model from tensors under the names of its checkpoint, in the dtypes of the model.

    The library itself loads a whole model only. Parameters that come from other tensors do not change: those on "meta"
    stay there.
    """
    loading = LoadStateDictConfig(
        device_map={"": device}, dtype=model.dtype, weight_mapping=get_model_conversion_mapping(model)
    )
    convert_and_load_state_dict_in_model(model, tensors, loading)


# ---- attributes


def native_class(model_class: type) -> type:
    """The library's own class among the bases of a generated one."""
    return next(base for base in model_class.__mro__ if base.__module__.startswith("transformers.models."))


def change_class(model: nn.Module, model_class: type):
    """Change the class of an existing base model to a subclass.

    A constructor cannot do this: the `__init__` of the native class with a head creates its base model by name, and
    building the base twice would need twice the memory and draw other random numbers. The constructor also registers
    the class in `_CAN_RECORD_REGISTRY`. This is repeated here; without it, `output_hidden_states` returns nothing.
    """
    model.__class__ = model_class
    # in 5.17 it is a plain dict with the name of the class as key; in 5.23 a subclass of dict with the same content
    dict.__setitem__(_CAN_RECORD_REGISTRY, str(model_class), model._can_record_outputs)


def same_forward(layer_class: type, family: str, name: str) -> bool:
    """Whether the forward of a layer class computes word for word what that of layer `name` of a family does.

    Families copy such layers from each other under new names, so the names do not tell what a layer computes.
    """
    model_class = model_class_of(CONFIG_MAPPING[family], AutoModel)
    reference = getattr(sys.modules[model_class.__module__], name)
    codes = [getattr(layer.forward, "__code__", None) for layer in (layer_class, reference)]
    words = [code and (code.co_code, code.co_names, code.co_consts, code.co_varnames) for code in codes]
    return words[0] is not None and words[0] == words[1]


def keep_in_fp32(model: nn.Module, patterns: set[str]):
    """Keep the matching parameters in fp32, whatever dtype the model is loaded in. Call it before `post_init`."""
    model._keep_in_fp32_modules_strict = {*fp32_patterns_of(model), *patterns}


def fp32_patterns_of(model: nn.Module) -> set[str]:
    """The patterns of `keep_in_fp32` and of the native class."""
    return set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())


def loaded_in_fp32(model: nn.Module, dtype: torch.dtype) -> set[str]:
    """The patterns of parameters that `from_pretrained(dtype=...)` loads in fp32."""
    halves = (torch.float16, torch.bfloat16)
    patterns = fp32_patterns_of(model) if dtype in halves else set()
    # against the overflow of models that were trained in bf16
    return patterns | set((model._keep_in_fp32_modules or ()) if dtype == torch.float16 else ())


def ignored_when_loading(model: nn.Module) -> set[str]:
    """Regular expressions of tensors that checkpoints of a class may hold and the library does not load."""
    return set(model._keys_to_ignore_on_load_unexpected or ())


def load_every_tensor(model: nn.Module):
    """Forget the patterns of tensors that old checkpoints of the native class may contain and the library ignores.

    vLLM reads these patterns as regular expressions: "attn.bias" of GPT-2 would drop the bias of its `c_attn`.
    """
    model._keys_to_ignore_on_load_unexpected = None


MASKED_ATTENTION = ("sdpa", "eager")  # implementations of attention that take a mask of [T, T]


def attention_implementation(config) -> str:
    """The attention implementation of a configuration, e.g. "sdpa" or "flash_attention_2", which has no mask.

    "" if none is set.
    """
    return getattr(config, "_attn_implementation", None) or ""


@contextmanager
def attention_computed_by(config, function):
    """Inside this context the attention modules with this configuration call `function(module, query, key, value,
    attention_mask, **options)`, as the functions of `AttentionInterface`.
    """
    before = config._attn_implementation
    AttentionInterface.register("memmix", function)
    config._attn_implementation = "memmix"
    try:
        yield
    finally:
        config._attn_implementation = before


@contextmanager
def fill_one(module: nn.Module, name: str):
    """A context in which `transformers.initialization` fills only one parameter, as if the others were loaded."""
    others = [parameter for other, parameter in module.named_parameters() if other != name]
    for parameter in others:
        parameter._is_hf_initialized = True
    try:
        yield
    finally:
        for parameter in others:
            del parameter._is_hf_initialized


def execution_device(module: nn.Module) -> torch.device:
    """The device on which a module computes. If accelerate offloads its parameters, these are on "meta" instead."""
    hook = getattr(module, "_hf_hook", None)  # accelerate's
    for one in getattr(hook, "hooks", [hook]):
        if getattr(one, "execution_device", None) is not None:
            return torch.device(one.execution_device)
    return next(module.parameters()).device


def tensor_parallel_size(config) -> int:
    """How many ranks share the layers of a model of this configuration."""
    return getattr(getattr(config, "distributed_config", None), "tp_size", None) or 1


def tensor_parallel_mesh(model: nn.Module):
    """The mesh of the ranks that share the layers of a model."""
    mesh = model._device_mesh
    return mesh["tp"] if mesh.ndim > 1 else mesh


def drop_unmatched_rules(model: nn.Module, inside: set[str] | None = None):
    """Take the rules that name nothing in a model out of its tensor-parallel plan; the library warns about each.

    inside: only rules for what is inside modules of these names, because a quantiser may still make the others' names.
    """
    names = {name for name, _ in (*model.named_modules(), *model.named_parameters())}
    names = {re.sub(r"\.\d+(?=\.|$)", ".*", name) for name in names}
    model._tp_plan = {
        rule: style
        for rule, style in (model._tp_plan or {}).items()
        if rule in names or (inside is not None and inside.isdisjoint(rule.split(".")))
    }


def name_in_plan(model: nn.Module, paths):
    """Note in a model's plan that modules are sharded already, so that the library does not report them as missed."""
    rules = {re.sub(r"\.\d+(?=\.|$)", ".*", path): "memmix" for path in paths}
    model._tp_plan = {**(model._tp_plan or {}), **rules}


# ---- methods


def load_generation_config(model: nn.Module, folder) -> None:
    """Give a model the generation settings of a folder, as `from_pretrained` does after loading the weights."""
    from_hub = {"cache_dir": None, "force_download": False, "proxies": None, "local_files_only": True, "token": None}
    model.adjust_generation_fn(
        None, True, None, folder, **from_hub, revision="main", subfolder="", trust_remote_code=False
    )


@contextmanager
def masks_without_looking():
    """Inside this context, models without a padding mask make no mask and do not look at positions: nothing is packed.

    The library looks for packed documents in the positions of every batch, which waits for the GPU. While a CUDA graph
    is recorded it must not, and then it would make masks of size T^2, with which attention runs other kernels.
    """
    own = masking_utils.find_packed_sequence_indices, masking_utils.is_tracing
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    masking_utils.is_tracing = lambda tensor=None: False
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices, masking_utils.is_tracing = own
