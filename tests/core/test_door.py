"""transformers' private parts: every one that we need is where it was, and only the doors touch them.

Moving to the next release of transformers begins here: a row that fails names what has changed.
"""

import ast
import importlib
import inspect
import re
from dataclasses import fields
from functools import partial
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState, PartialState
from torch import nn
from transformers import (
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    TrainingArguments,
)
from transformers.cache_utils import (
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

import hf_memmix
from hf_memmix import _generation_hooks as generation_door
from hf_memmix import _model_hooks as model_door
from hf_memmix import _transformers as door
from hf_memmix.training import _trainer_hooks as trainer_door

ROOT = Path(hf_memmix.__file__).parents[1]
DOORS = [Path(module.__file__) for module in (door, model_door, generation_door, trainer_door)]
# modules of transformers whose public names are documented; what comes from any other one goes through a door
DOCUMENTED = (
    "transformers",
    "transformers.cache_utils",
    "transformers.modeling_outputs",
    "transformers.trainer_utils",
    "transformers.utils",
)

# methods of the library that a door overrides or calls, with the parameters that it relies on, in their order
METHODS = {
    **{f"transformers.PreTrainedModel.{name}": wanted for name, wanted in model_door.RELIED_ON.items()},
    **{f"transformers.GenerationMixin.{name}": wanted for name, wanted in generation_door.RELIED_ON.items()},
    "transformers.masking_utils.create_masks_for_generate": (
        f"config inputs_embeds attention_mask {generation_door.CACHE}"
    ),
    "transformers.masking_utils.find_packed_sequence_indices": "position_ids",
    "transformers.masking_utils.is_tracing": "tensor",
    "transformers.conversion_mapping.get_checkpoint_conversion_mapping": "model_type",
    "transformers.conversion_mapping.register_checkpoint_conversion_mapping": (
        "model_type_or_class_name mapping overwrite"
    ),
    "transformers.conversion_mapping.get_model_conversion_mapping": "model key_mapping hf_quantizer add_legacy",
    "transformers.core_model_loading.revert_weight_conversion": "model state_dict",
    "transformers.core_model_loading.convert_and_load_state_dict_in_model": "model state_dict load_config",
    "transformers.GenerationMixin.adjust_generation_fn": (
        "generation_config from_auto_class from_pipeline pretrained_model_name_or_path cache_dir force_download"
        " proxies local_files_only token revision subfolder trust_remote_code"
    ),
    **{f"transformers.Trainer.{name}": wanted for name, wanted in trainer_door.RELIED_ON.items()},
    "transformers.quantizers.base.get_keys_to_not_convert": "model",
    "transformers.integrations.get_available_reporting_integrations": "",
    "transformers.integrations.get_reporting_integration_callbacks": "report_to",
    "transformers.integrations.deepspeed.unset_hf_deepspeed_config": "",
    "transformers.trainer_utils.rotate_checkpoints": "output_dir save_total_limit",
    "transformers.initialization.no_init_weights": "",
    "transformers.models.llama.modeling_llama.LlamaRMSNorm.forward": "hidden_states",
    "transformers.models.llama.modeling_llama.LlamaMLP.forward": "x",
}


def resolve(path):
    """The object at a dotted path: in the longest part of it that is a module."""
    parts = path.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:end]))
        except ImportError:
            continue
        for part in parts[end:]:
            found = getattr(found, part)
        return found
    raise ImportError(path)


@pytest.mark.parametrize("path", METHODS)
def test_method(path):
    names = [name for name in inspect.signature(resolve(path)).parameters if name not in ("self", "cls")]
    wanted = METHODS[path].split()
    assert names[: len(wanted)] == wanted


# attributes and tables: what has to be true of each
def tiny(kind=LlamaForCausalLM):
    sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8}
    return kind(LlamaConfig(**sizes, num_hidden_layers=1, num_attention_heads=1))


def reads(module, name):
    """The library reads an attribute that we set."""
    return re.search(rf"\.{name}\b|[\"']{name}[\"']", inspect.getsource(resolve(module)))


def noted_when_a_full_mask_is_dropped(name):
    """Where generate() drops a mask without pads it notes the width; 5.17 keeps such a mask."""
    dropped = '["attention_mask"] == 1).all()' in inspect.getsource(resolve("transformers.generation.utils"))
    return bool(reads("transformers.generation.utils", name)) == dropped


def registers(name):
    registry, model = resolve("transformers.utils.output_capturing." + name), tiny(LlamaModel)
    key = str(type(model))
    stored = dict.pop(registry, key)
    dict.__setitem__(registry, key, stored)
    assert stored is type(model)._can_record_outputs
    # read back by the way of the library: it gives hidden states
    return model(torch.tensor([[1]]), output_hidden_states=True).hidden_states


def marks_filled_modules(name):
    return getattr(tiny().lm_head, name) is True


def has_hook(name):
    from accelerate.hooks import AlignDevicesHook, SequentialHook, add_hook_to_module

    linear = add_hook_to_module(nn.Linear(1, 1), AlignDevicesHook(execution_device="cpu"))
    return getattr(linear, name).execution_device == "cpu" and SequentialHook(AlignDevicesHook()).hooks


def one_gpu(name):
    arguments = TrainingArguments(output_dir="unused", report_to="none", use_cpu=True)
    setattr(arguments, name, 7)
    return arguments.n_gpu == 7


def chooses_the_device(name):
    """The device is the value of this cached property, which our arguments compute in another way."""
    arguments = TrainingArguments(output_dir="unused", report_to="none", use_cpu=True)
    chosen = arguments.device
    vars(arguments)[name] = torch.device("cuda", 1)
    return (
        chosen.type == "cpu" and arguments.device.index == 1 and isinstance(arguments.distributed_state, PartialState)
    )


def forgets(name):
    PartialState(cpu=True)
    getattr(AcceleratorState, name)(reset_partial_state=True)
    return not PartialState._shared_state


ATTRIBUTES = {
    "_is_stateful": lambda name: (
        LlamaForCausalLM._is_stateful is False and reads("transformers.generation.utils", name)
    ),
    "_can_record_outputs": lambda name: LlamaModel._can_record_outputs["hidden_states"],
    "_CAN_RECORD_REGISTRY": registers,
    "_keys_to_ignore_on_load_unexpected": lambda name: (
        hasattr(tiny(), name) and reads("transformers.modeling_utils", name)
    ),
    "_keep_in_fp32_modules_strict": lambda name: (
        tiny()._keep_in_fp32_modules_strict == set() and reads("transformers.modeling_utils", name)
    ),
    "_keep_in_fp32_modules": lambda name: (
        tiny()._keep_in_fp32_modules == set() and reads("transformers.modeling_utils", name)
    ),
    "_is_hf_initialized": marks_filled_modules,
    "_mask_length": noted_when_a_full_mask_is_dropped,
    "_attn_implementation": lambda name: getattr(LlamaConfig(attn_implementation="eager"), name) == "eager",
    "_hf_hook": has_hook,
    "_tp_plan": lambda name: "model.layers.*.self_attn.q_proj" in getattr(tiny(), name),
    "_device_mesh": lambda name: reads("transformers.distributed.mixin", name),
    "_n_gpu": one_gpu,
    "_setup_devices": chooses_the_device,
    "_reset_state": forgets,
    "deepspeed": lambda name: resolve("transformers.integrations." + name).is_deepspeed_zero3_enabled() is False,
    "_hf_deepspeed_config_weak_ref": lambda name: (
        name in inspect.getsource(resolve("transformers.integrations.deepspeed.is_deepspeed_zero3_enabled"))
    ),
    "_no_split_modules": lambda name: reads("accelerate.utils.fsdp_utils", name),
    "_supports_sdpa": lambda name: getattr(LlamaModel, name) and reads("transformers.modeling_utils", name),
    "_name_or_path": lambda name: getattr(LlamaConfig.from_dict({name: "x"}), name) == "x",
    "IDLE_FIELDS": lambda name: (
        {"architectures", "dtype", "transformers_version", "use_cache"} < LlamaConfig().to_dict().keys()
    ),
    "LoadStateDictConfig": lambda name: (
        {"device_map", "dtype", "weight_mapping"} <= {field.name for field in fields(getattr(door, name))}
    ),
    # attributes of cache layers without an underscore that are not documented: hf_memmix/cache reads and sets them
    "layer_class_to_replicate": lambda name: getattr(DynamicCache(), name)(),
    "record_past": lambda name: (
        getattr(DynamicSlidingWindowLayer(4), name) is False and getattr(LinearAttentionLayer(1), name) is False
    ),
    "has_previous_state": lambda name: getattr(LinearAttentionLayer(1), name) == {0: False},
    "cumulative_length": lambda name: (
        getattr(DynamicSlidingWindowLayer(4), name) == 0 and isinstance(getattr(StaticLayer(4), name), torch.Tensor)
    ),
    "prefetch_stream": partial(reads, "transformers.cache_utils"),
    "only_non_sliding": partial(reads, "transformers.cache_utils"),
    "cumulative_length_int": lambda name: getattr(StaticSlidingWindowLayer(4, 2), name) == 0,
    # attributes without an underscore of models and of the Trainer, which training reads or sets
    "all_tied_weights_keys": lambda name: getattr(tiny(), name) == {},
    **{
        name: partial(reads, "transformers.trainer")
        for name in (
            "is_fsdp_enabled",
            "is_deepspeed_enabled",
            "current_gradient_accumulation_steps",
            "model_accepts_loss_kwargs",
            "num_input_tokens_seen",
        )
    },
    # keyword arguments that generate() hands over
    "is_first_iteration": lambda name: (
        name in inspect.signature(LlamaForCausalLM.prepare_inputs_for_generation).parameters
    ),
    "kwargs": lambda name: (
        f'"{name}" in model_args' in inspect.getsource(resolve("transformers.GenerationMixin._validate_model_kwargs"))
    ),
}


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_attribute(name):
    assert ATTRIBUTES[name](name)


# ---- only the doors

PRIVATE_SOURCES = (
    "transformers.modeling_utils",
    "transformers.configuration_utils",
    "transformers.cache_utils",
    "transformers.generation.utils",
    "transformers.models.auto.auto_factory",
    "transformers.trainer",
    "transformers.training_args",
)


def private_names():
    found = {"_hf_hook"}
    for source in PRIVATE_SOURCES:
        text = inspect.getsource(importlib.import_module(source))
        found |= set(re.findall(r"\.(_[a-z]\w*)\b", text)) | set(
            re.findall(r"(?:def |^    )(_[a-z]\w*)\b", text, re.M)
        )
    return found - set(dir(nn.Linear(1, 1))) - set(dir(torch))


PRIVATE = private_names()


def _name_in(node):
    match node:
        case ast.Attribute():  # self._sample, super()._sample
            return node.attr
        case ast.FunctionDef():  # an override
            return node.name
        case ast.Constant():  # getattr(module, "_hf_hook", None)
            return node.value
        case ast.Name(ctx=ast.Store()):  # _is_stateful = False
            return node.id
        case ast.arg():
            return node.arg


def imported(tree):
    """(line, name) of what a module imports of the library's private parts."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "transformers":
            names = [alias.name for alias in node.names]
            yield from ((node.lineno, name) for name in names if name.startswith("_") or node.module not in DOCUMENTED)
        elif isinstance(node, ast.Import):
            yield from ((node.lineno, a.name) for a in node.names if a.name.startswith("transformers."))


def used(tree):
    """(line, name) of the private names that a module overrides, reads, sets or calls."""
    named = ((node, _name_in(node)) for node in ast.walk(tree))
    return [(node.lineno, name) for node, name in named if isinstance(name, str) and name in PRIVATE]


def touched(file):
    tree = ast.parse(file.read_text())
    return [*imported(tree), *used(tree)]


def test_nothing_private_outside_the_doors():
    files = [file for folder in ("hf_memmix", "conversion", "training") for file in (ROOT / folder).rglob("*.py")]
    assert len(files) > 50
    found = [
        f"{file.relative_to(ROOT)}:{line} {name}"
        for file in files
        if file not in DOORS
        for line, name in touched(file)
    ]
    assert not found


def test_every_hook_of_a_door_has_a_row():
    """What is imported needs none: without it the package is not imported either."""
    rows = ATTRIBUTES.keys() | {path.rpartition(".")[2] for path in METHODS} | {"_internal_call"}
    found = {name for file in DOORS for _, name in used(ast.parse(file.read_text()))}
    assert {"_sample", "_n_gpu"} <= found
    assert not found - rows


def test_walk_finds_private_names(tmp_path):
    file = tmp_path / "sample.py"
    file.write_text(
        "from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS\n"
        "from transformers import initialization\n"
        "class Model:\n"
        "    _is_stateful = False\n"
        "    def _sample(self):\n"
        "        return super()._prefill(), getattr(self, '_hf_hook')\n"
    )
    found = {name for _, name in touched(file)}
    assert found == {"ROPE_INIT_FUNCTIONS", "_is_stateful", "_sample", "_prefill", "_hf_hook"}
