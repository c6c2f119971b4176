"""What vLLM must know of a memmix configuration before it builds the model, and what is refused at that point."""

import copy

import torch
from vllm.model_executor.models.config import VerifyAndUpdateConfig

from ...backbones import window_of
from ...configuration_memmix import MemMixConfig
from ...mixers import ATTENTION, MemoryMixer, new_layer
from ..families import refusal_of_serving
from .options import refusal_of_options

OP = "vllm::memmix_mix"  # the operator of mixer_server.py
_LAYER_TYPES = "memmix_backbone_layer_types"


class MemMixVerifyAndUpdate(VerifyAndUpdateConfig):
    """vLLM calls the first method when it has read config.json, the second when all options are known."""

    @staticmethod
    def verify_and_update_model_config(model_config):
        """Say which layers have states, in the two ways in which vLLM asks.

        It counts layers by `layers_block_type`, and it takes a model for a plain transformer if all of `layer_types`
        are "full_attention". The backbone's own list is kept, see `original_config`.

        Raises:
            ValueError: the family cannot be served.
        """
        config = model_config.hf_config
        if refusal := refusal_of_serving(config):
            raise ValueError(refusal)
        kinds = config.mixer_types
        config.layers_block_type = ["attention" if kind == ATTENTION else "mamba" for kind in kinds]
        types = getattr(config, "layer_types", None)
        if types is not None and not hasattr(config, _LAYER_TYPES):
            setattr(config, _LAYER_TYPES, list(types))
            config.layer_types = [
                t if k == ATTENTION else "linear_attention" for t, k in zip(types, kinds, strict=True)
            ]

    @classmethod
    def verify_and_update_config(cls, vllm_config):
        """Cut piecewise graphs around the operator; keep the states of prefixes at the ends of blocks ("align").

        Raises:
            ValueError: an option of `options.REFUSALS` is given, or the mixers cannot be divided over the ranks.
        """
        if refusal := refusal_of_options(vllm_config):
            raise ValueError(refusal)
        if (ranks := vllm_config.parallel_config.tensor_parallel_size) > 1:
            for mixer in mixers_of(original_config(vllm_config.model_config.hf_config)).values():
                try:
                    mixer.tp_plan(ranks)
                except ValueError as error:
                    raise ValueError(f"--tensor-parallel-size {ranks}: {error}") from None
        cut_graphs(vllm_config.compilation_config)
        cache = vllm_config.cache_config
        if cache.enable_prefix_caching and cache.mamba_cache_mode == "none":
            cache.mamba_cache_mode = "align"


def cut_graphs(compilation):
    """Have vLLM cut the graphs of one model at the operator, as it does at attention.

    The list becomes an attribute of this configuration, not of its class: other models of the process keep theirs.
    """
    if OP not in compilation._attention_ops:
        object.__setattr__(compilation, "_attention_ops", [*compilation._attention_ops, OP])


def original_config(hf_config) -> MemMixConfig:
    """A copy of the configuration as config.json has it, without what `MemMixVerifyAndUpdate` has changed."""
    config = copy.deepcopy(hf_config)
    if hasattr(config, _LAYER_TYPES):
        config.layer_types = getattr(config, _LAYER_TYPES)
        delattr(config, _LAYER_TYPES)
    if hasattr(config, "layers_block_type"):
        del config.layers_block_type
    return config


def layer_kinds(config) -> dict[int, tuple]:
    """What the sizes of a mixer depend on, by layer: its kind, and its window, which differs in a backbone where some
    layers have one.
    """
    return {i: (kind, window_of(config, i)) for i, kind in enumerate(config.mixer_types) if kind != ATTENTION}


def mixers_of(config) -> dict[tuple, MemoryMixer]:
    """One mixer of each of the `layer_kinds`, without memory for its parameters."""
    first = {}
    for i, kind in layer_kinds(config).items():
        first.setdefault(kind, i)
    with torch.device("meta"):
        return {kind: new_layer(kind[0], config, i) for kind, i in first.items()}


def attention_window(config, layer: int) -> int | None:
    """The tokens that vLLM keeps in a layer with attention; None: all. Without a list of types it keeps all."""
    types = getattr(config, "layer_types", None)
    return config.sliding_window if types and types[layer] == "sliding_attention" else None
