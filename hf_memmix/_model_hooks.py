"""The private methods of the library's models that ours override: a part of the door `_transformers`.

They call methods with public names, which the model classes implement. Each one has the same name, arguments and
meaning from transformers 5.17 to 5.24, unless a comment names the releases. What would change a model without an error
is checked when a model class is made: `check_models`.
"""

import functools
from contextlib import contextmanager
from typing import ClassVar

import torch
from torch import nn
from transformers import PreTrainedModel

from ._transformers import native_class, tensor_parallel_mesh
from .versions import check_methods, moved

# methods of the library's models and the parameters, in their order, that the classes below rely on
RELIED_ON = {
    "_from_config": "config",
    "_init_weights": "module",
    "_initialize_weights": "module is_custom_code",
    "_can_set_attn_implementation": "",
    "_can_set_experts_implementation": "",
    "maybe_distribute_model": "model distributed_config",
    "save_distributed_checkpoint": "model_to_save save_directory",
    "gather_sharded_state_dict_for_save": "model_to_save state_dict",
}
# attributes of the library's models that are read or set here
_ATTRIBUTES = (
    "_is_stateful",
    "_can_record_outputs",
    "_keep_in_fp32_modules",
    "_keep_in_fp32_modules_strict",
    "_keys_to_ignore_on_load_unexpected",
    "_no_split_modules",
    "_supports_sdpa",
    "_tp_plan",
    "_device_mesh",
)


@functools.cache
def check_models():
    """Raise RuntimeError if the library's models lack a method of `RELIED_ON` or an attribute."""
    check_methods(PreTrainedModel, RELIED_ON, "PreTrainedModel")
    if missing := [name for name in _ATTRIBUTES if not hasattr(PreTrainedModel, name)]:
        raise moved(f"PreTrainedModel has no attribute {missing[0]}")


class OwnModules:
    """How modules that fill themselves are initialised. A base class that stands before the library's class."""

    own_modules: ClassVar[tuple[type[nn.Module], ...]] = ()  # modules with `init_weights()`, which fill themselves

    @torch.no_grad()
    def _init_weights(self, module):
        """Initialise ours after the native class's modules. `transformers.initialization` skips loaded tensors."""
        super()._init_weights(module)
        if isinstance(module, self.own_modules):
            module.init_weights()

    def _initialize_weights(self, module, *args, **kwargs):
        """The library skips a module whose parameters are all in its children."""
        if isinstance(module, self.own_modules) and not getattr(module, "_is_hf_initialized", False):
            self._init_weights(module)
            module._is_hf_initialized = True
        super()._initialize_weights(module, *args, **kwargs)


class ImageModelHooks(OwnModules):
    """What the library asks of a model class that has no native class among its bases."""

    undivided_modules: ClassVar[tuple[str, ...]] = ()  # class names of modules that stay whole on one device

    _supports_sdpa = True  # without it, the library refuses the default attention implementation of other models

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        cls._no_split_modules = list(cls.undivided_modules)


class ConstructionHooks(OwnModules):
    """How a model with mixers is built. A base class that stands before a native class."""

    # generate() refuses assisted decoding for models whose cache cannot be rolled back; ours can
    _is_stateful = False

    @classmethod
    def concrete_class(cls, config) -> type:
        """The class to build for a configuration. `MemMixModel` etc. return the class of the backbone instead."""
        return cls

    @classmethod
    def _from_config(cls, config, **kwargs):
        """`AutoModel.from_config` calls it."""
        concrete = cls.concrete_class(config)
        return super()._from_config(config, **kwargs) if concrete is cls else concrete._from_config(config, **kwargs)

    # the library searches the source code of `cls.__module__` for both, so the native class must answer

    @classmethod
    def _can_set_attn_implementation(cls):
        return native_class(cls)._can_set_attn_implementation()

    @classmethod
    def _can_set_experts_implementation(cls):
        return native_class(cls)._can_set_experts_implementation()


class DistributionHooks:
    """How a model is spread over several processes by `from_pretrained`. Goes before a native class."""

    @contextmanager
    def sharding(self, ranks: int):
        """A context in which the library shards the model for tensor parallelism; it gives a function of the mesh
        that shards the rest.
        """
        raise NotImplementedError

    def whole_tensors(self, tensors: dict) -> dict:
        """Tensors of a state dict by name, sharded ones as a whole."""
        raise NotImplementedError

    def check_distributed_checkpoint(self):
        """Raise ValueError if the ranks must not write what they hold."""
        raise NotImplementedError

    @classmethod
    def maybe_distribute_model(cls, model, distributed_config, mesh, *args, **kwargs):
        """`from_pretrained` calls it after construction, when all parameters are on "meta", and before loading.

        `mesh` is a mesh in 5.17 and an object that makes meshes in 5.23, and None if one process does it all.
        """
        ranks = getattr(distributed_config, "tp_size", None) or 1
        if mesh is None or ranks == 1:
            return super().maybe_distribute_model(model, distributed_config, mesh, *args, **kwargs)
        with model.sharding(ranks) as shard_the_rest:
            model = super().maybe_distribute_model(model, distributed_config, mesh, *args, **kwargs)
            shard_the_rest(tensor_parallel_mesh(model))
        return model

    def save_distributed_checkpoint(self, *args, **kwargs):
        """`save_pretrained(distributed_checkpoint=True)`: every rank writes what it holds."""
        self.check_distributed_checkpoint()
        return super().save_distributed_checkpoint(*args, **kwargs)

    def gather_sharded_state_dict_for_save(self, model_to_save, state_dict, *args, **kwargs):
        """`save_pretrained` writes what this returns."""
        state_dict = self.whole_tensors(state_dict)
        return super().gather_sharded_state_dict_for_save(model_to_save, state_dict, *args, **kwargs)
