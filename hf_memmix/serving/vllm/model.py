"""Any decoder with mixers in vLLM: its Transformers backend, with memory layers in place of some attentions.

The Transformers backend builds the backbone's own model, all layers attention, on the meta device. Then it replaces
linear layers, norms and the attention function by vLLM's. Here the mixers are put in first, as in training, and kept
out of these replacements: only their linear layers become vLLM's.
"""

import re

import torch
import vllm._custom_ops
from torch import nn
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.mamba.mamba_utils import get_temporal_copy_spec
from vllm.model_executor.models.interfaces import HasInnerState, IsHybrid, SupportsMambaPrefixCaching
from vllm.model_executor.models.transformers import (
    TransformersForCausalLM,
    TransformersForSequenceClassification,
    TransformersMoEForCausalLM,
)

from ..._transformers import load_every_tensor
from ...backbones import backbone_of
from ...mixers import ATTENTION, FeedForward, MemoryMixer
from ...swap import decoder_layers, modules_of, swap_attention, swap_feed_forward
from .compat import KeptAttention
from .config import original_config
from .joined import JoinedLayers
from .layer import add_memory_layers
from .loading import CheckpointNames, check_loaded, check_not_packed, forget_packed_weights, mark_unloaded
from .metadata import MemoryBackend, backend_beside
from .packing import pack_alike
from .page_plan import PAGE_DTYPE, largest_page, page_shape
from .parameters import replace_parameters
from .shared_class import share_class


class MemMixMixin(KeptAttention):
    """Goes before a class of the Transformers backend."""

    has_inner_state = True
    is_hybrid = True
    supports_mamba_prefix_caching = True

    # ---- what vLLM asks of the class, before there is a model

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config) -> tuple[tuple[int, ...], ...]:
        """One state: the bytes of the largest page. vLLM makes all pages of a model equally large."""
        return page_shape(largest_page(vllm_config))

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config) -> tuple[torch.dtype, ...]:
        return (PAGE_DTYPE,)

    @classmethod
    def get_mamba_state_copy_func(cls):
        """A page is copied as a whole when a prefix is kept."""
        return (get_temporal_copy_spec,)

    # ---- construction, in the order of the base class

    def __init__(self, *, vllm_config, prefix: str = ""):
        pack_alike(vllm._custom_ops)
        self.vllm_config = vllm_config  # the oldest base class does not keep it
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        if hasattr(self, "logits_processor"):
            self.logits_processor = self._logits_processor()
        share_class(type(self.model))
        self.names = CheckpointNames()
        mark_unloaded(self)

    def _logits_processor(self) -> LogitsProcessor:
        """What the family does to its logits; vLLM's own reads the fields of a few families only."""
        row = backbone_of(self.memmix_config).logits

        def value(field, default):
            return (getattr(self.config, field, None) if field else None) or default

        return LogitsProcessor(
            self.config.vocab_size,
            scale=value(row.factor, 1.0) / value(row.divisor, 1.0),
            soft_cap=value(row.softcap, None),
        )

    def _patch_config(self):
        """Build the backbone's own model: from here on, `config` is the backbone's, as vLLM knows it."""
        self.memmix_config = original_config(self.config)
        backbone = self.memmix_config.backbone_config()
        # vLLM looks for the names of a few families in here
        backbone.architectures = list(self.memmix_config.architectures or [])
        self.config = self.text_config = backbone
        super()._patch_config()

    def _create_hf_to_vllm_mapper(self):
        """Drop no tensor, because a checkpoint of ours contains those of the model and no others."""
        load_every_tensor(self.model)
        super()._create_hf_to_vllm_mapper()

    def pipeline_parallel(self):
        """Put in the mixers, and let the base class take out the layers of other stages."""
        base = self.model
        with torch.device("meta"):
            swap_attention(base, self.memmix_config)
            swap_feed_forward(base, self.memmix_config)
        for layer in decoder_layers(base):
            # they pass on padding and packing, which do not exist here
            layer._forward_pre_hooks.clear()
            layer._forward_pre_hooks_with_kwargs.clear()
        super().pipeline_parallel()

    def recursive_replace(self):
        """Keep the mixers, and let the base class replace everything else."""
        base = self.model
        own = modules_of(base, (MemoryMixer, FeedForward))
        for path in own:
            base.set_submodule(path, nn.Identity())
        super().recursive_replace()
        dtype, device = self.model_config.dtype, self.device_config.device
        for path, module in own.items():
            join = self.vllm_config.lora_config is None
            replace_parameters(module, f"model.{path}", dtype, device, join)
            base.set_submodule(path, module)
        self.mixers = {path: module for path, module in own.items() if isinstance(module, MemoryMixer)}

    def memory_layers(self) -> dict[int, str]:
        """For `KeptAttention`: the paths of the layers without attention."""
        return {mixer.layer_idx: f"model.{path}" for path, mixer in self.mixers.items()}

    def connect_memories(self, prefix: str):
        """For `KeptAttention`: enter the mixers into vLLM's table of layers with a cache."""
        stages, kept = self.pp_group.world_size, ATTENTION in self.memmix_config.mixer_types
        beside = self.attention_backend if stages > 1 and kept else None
        backend = MemoryBackend if beside is None else backend_beside(beside)
        mixers = {f"{prefix}.model.{path}".lstrip("."): mixer for path, mixer in self.mixers.items()}
        add_memory_layers(mixers, self.vllm_config, backend)

    def load_weights(self, weights):
        """As in vLLM, but raise ValueError if the checkpoint lacks a parameter; vLLM does not check linear layers.

        Called again, it changes the weights of a running engine: a list has some tensors, as trainers send them; an
        iterator has a whole checkpoint, if vLLM has moved the parameters to "meta" before (`reload_weights`).
        """
        first, self.names.first = self.names.first, False
        is_start = first and self.vllm_config.load_config.load_format != "dummy"  # whose weights a trainer sends later
        if not is_start and self.vllm_config.quant_config is not None:
            raise ValueError("quantised weights cannot be loaded again: start a new server with the new checkpoint")
        if not is_start and self.vllm_config.kv_transfer_config is not None:
            raise ValueError(
                "with --states weights cannot be loaded again: the states on disk belong to those of the start. Start"
                " a new server with the new checkpoint, or one without --states"
            )
        whole = not isinstance(weights, (list, tuple))
        reload = any(parameter.is_meta for mixer in self.mixers.values() for parameter in mixer.parameters())
        if self.device_config.device.type == "cpu":
            forget_packed_weights(self)
        try:
            loaded = super().load_weights(self.names.noted(weights))
        except AssertionError as error:  # of a size
            check_not_packed(self, error)
            raise
        if reload and whole:
            self.names.check_reload()
        if first and not reload:
            check_loaded(self)
            self.names.expected = self.names.found if whole else set()  # a trainer that starts with "dummy" weights
        for mixer in self.mixers.values():
            mixer.check_weights()
        joined = {path: module for path, module in self.named_modules() if isinstance(module, JoinedLayers)}
        # their parameters have other names than those of the checkpoint
        return loaded | {f"{path}.{leaf}" for path, module in joined.items() for leaf in module._parameters}


# the protocols come last: each brings an `__init__` of its own
class MemMixForCausalLM(MemMixMixin, TransformersForCausalLM, HasInnerState, IsHybrid, SupportsMambaPrefixCaching):
    """A causal language model with mixers."""

    def __new__(cls, *, vllm_config, prefix: str = ""):
        """The class with vLLM's fused experts, if the model has experts."""
        if cls is MemMixForCausalLM and vllm_config.model_config.get_num_experts():
            return MemMixMoEForCausalLM(vllm_config=vllm_config, prefix=prefix)
        return super().__new__(cls)


class MemMixMoEForCausalLM(
    MemMixMixin, TransformersMoEForCausalLM, HasInnerState, IsHybrid, SupportsMambaPrefixCaching
):
    """A causal language model with mixers and with mixtures of experts."""


class MemMixForSequenceClassification(
    MemMixMixin, TransformersForSequenceClassification, HasInnerState, IsHybrid, SupportsMambaPrefixCaching
):
    """A sequence classifier with mixers; it reads the last token, as transformers' decoders do."""

    default_seq_pooling_type = "LAST"

    def __init__(self, *, vllm_config, prefix: str = ""):
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        # the heads of encoders take [B, 1, hidden]; that of a decoder is a linear layer, for the last token itself
        self.classifier.__class__ = nn.Linear

    def load_weights(self, weights):
        """vLLM calls the last layer `classifier`, whatever its name in the checkpoint."""
        return super().load_weights((re.sub(r"^score\.", "classifier.", name), weight) for name, weight in weights)
