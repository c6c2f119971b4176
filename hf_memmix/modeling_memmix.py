"""transformers' decoders with memory mixers in place of attention in chosen layers.

`MemMixModel` and `MemMixForCausalLM` are mixed into the family's own classes: `MemMixLlamaForCausalLM` *is* a
`LlamaForCausalLM`, so norms, MLPs, rotary embeddings, soft-caps, weight names and generate() stay transformers' own.
The classes of a backbone are made and registered with the Auto classes when its configuration is first used
(`generated_models.py`).

    model = AutoModelForCausalLM.from_pretrained(folder)                 # after `import hf_memmix`
    model = AutoModelForCausalLM.from_config(memmix_config(backbone, mixer_types=[...]))
"""

import torch
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedModel,
)

from . import generated_models
from ._generation_hooks import CACHE
from ._transformers import change_class, model_class_of
from .cache import RecurrentStateCache, cast_cache, note_dtype
from .context_parallel import current_group, keep_masks, refuse_pooling, refuse_sequence_parallelism, split_loss
from .errors import UserError
from .generation import NO_CONTINUOUS_BATCHING, MemoryGeneration
from .model_inputs import ModelInputs, fit_cache, lay_out, mask_of, take_cache, tokens_of
from .pretrained import MemMixPreTrained
from .swap import memory_mixers
from .training_length import check_training_length


class MemMixModel(MemMixPreTrained):
    """A base model with mixers: `MemMixModel(config)` and `MemMixModel.from_pretrained(folder)` build any family's.

    forward() has the arguments of the native model. The 2D `attention_mask` [B, T] may hide tokens in any pattern.
    Packed sequences are given by `cu_seq_lens_q`, `seq_idx` [B, T], or `position_ids` that start at 0 again. They
    never see each other, and there is no cache, also by default. In transformers, `position_ids` separate them with
    use_cache=False only: compare a model with its teacher so.
    """

    def __init__(self, config):
        super().__init__(config.of_a_new_model())
        self.insert_mixers()

    def _checkpoints_activations(self) -> bool:
        """Whether this forward recomputes activations in backward. Each layer decides by its own mode."""
        modules = (self, *getattr(self, self._layers_name))
        return any(module.training and getattr(module, "gradient_checkpointing", False) for module in modules)

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        inputs_embeds=None,
        use_cache=None,
        **kwargs,
    ):
        """The native model's output; `past_key_values` in it is a `RecurrentStateCache` if none was given.

        Args:
            input_ids, inputs_embeds: tokens [B, T] of int64, or their embeddings [B, T, hidden]; one of the two.
            attention_mask: [B, T], or with a cache [B, tokens read + T]; 0 hides a token, in any pattern.
            position_ids: [B, T]; by default they count from the first token of a row.
            past_key_values: the cache of the tokens before; it is advanced in place. `cache` is its name since
                transformers 5.24; either name is taken.
            use_cache: whether to make a cache; default: the configuration's.
            kwargs: `cu_seq_lens_q` [N + 1] or `seq_idx` [B, T] for packed sequences, and those of the native model.

        Raises:
            ValueError: no tokens; embeddings that are not finite; in train mode, sequences from which a mixer learns
                nothing; a mask, positions or packing that do not fit each
                other or the cache; a cache while activations are checkpointed in training; or a request of
                transformers' continuous batching.
            RuntimeError: a cache under a name that no layer would read.
        """
        given = take_cache(past_key_values, kwargs)
        tokens = tokens_of(input_ids, inputs_embeds)
        if "read_index" in kwargs:  # the addresses in the paged cache of a `ContinuousBatchingManager`
            raise UserError(NO_CONTINUOUS_BATCHING)
        checkpoints = self._checkpoints_activations()
        if given is not None:
            fit_cache(given, self.config, tokens.shape[0], checkpoints)
        inputs = ModelInputs(tokens, attention_mask, position_ids, given, use_cache)
        mask = mask_of(inputs, self.config, kwargs)
        keep_masks(getattr(self, self._layers_name))
        if self.training:  # in evaluation, DeepSpeed gives every process whole sequences
            refuse_sequence_parallelism()
        inputs, layout = lay_out(inputs, mask, self, kwargs)
        if self.training_lengths and self.training and given is None and torch.is_grad_enabled():
            check_training_length(self, inputs.length, layout)
        cache, use_cache = self._cache_of(inputs, checkpoints)
        return super().forward(
            input_ids=input_ids,
            attention_mask=inputs.attention_mask,
            position_ids=inputs.position_ids,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            memmix_layout=layout._replace(cached=cache is not None),
            **{CACHE: cache},
            **kwargs,
        )

    def _cache_of(self, inputs: ModelInputs, checkpoints: bool):
        """The cache of this forward or None, in the dtype of the model; and whether the output has it."""
        use_cache = self.config.use_cache if inputs.use_cache is None else inputs.use_cache
        use_cache = use_cache and not checkpoints
        cache = inputs.cache
        if use_cache and cache is None:
            cache = RecurrentStateCache(self.config)
        if cache is not None:
            self._take_over_dtype(cache)
        return cache, use_cache

    def _take_over_dtype(self, cache):
        """Cast a cache that was filled by a model of another dtype to the dtypes of this model."""
        before = cache.memmix.dtype
        if before == self.dtype:
            return
        note_dtype(cache, self.dtype)
        if before is not None:
            shapes = {i: mixer.state_shapes(1, self.dtype) for i, mixer in memory_mixers(self).items()}
            dtypes = {i: {name: dtype for name, (_, dtype) in named.items()} for i, named in shapes.items()}
            cast_cache(cache, self.dtype, dtypes)


class _WithHead(MemMixPreTrained):
    """A base model with a head. After the native constructor, the class of its base model is changed."""

    def __init__(self, config):
        super().__init__(config.of_a_new_model())
        base = getattr(self, self.base_model_prefix)
        if not isinstance(base, MemMixModel):
            change_class(base, model_class_of(type(config), AutoModel))
            base.insert_mixers()
        self.post_init()


_library_loss = PreTrainedModel.loss_function.fget  # a plain function, which torch.compile can follow


class MemMixForCausalLM(MemoryGeneration, _WithHead):
    """A causal language model with mixers and generate(); see `MemMixModel`."""

    _auto_class_for = AutoModelForCausalLM

    @PreTrainedModel.loss_function.getter
    def loss_function(self):
        """As in transformers; it raises ValueError for labels that are split over processes and not shifted before."""
        loss = _library_loss(self)
        return loss if current_group() is None else split_loss(loss)


class _OfWholeSequences(_WithHead):
    """A model that gives one answer for a sequence."""

    def __init__(self, config):
        super().__init__(config)
        self.register_forward_pre_hook(refuse_pooling)


class MemMixForSequenceClassification(_OfWholeSequences):
    """A sequence classifier with mixers; see `MemMixModel`."""

    _auto_class_for = AutoModelForSequenceClassification


class MemMixForTokenClassification(_WithHead):
    """A classifier of every token with mixers; see `MemMixModel`."""

    _auto_class_for = AutoModelForTokenClassification


class MemMixForQuestionAnswering(_OfWholeSequences):
    """Start and end of an answer in a text, with mixers; see `MemMixModel`."""

    _auto_class_for = AutoModelForQuestionAnswering
    _takes_cache = False  # it reads a text as a whole


_KINDS = (
    MemMixModel,
    MemMixForCausalLM,
    MemMixForSequenceClassification,
    MemMixForTokenClassification,
    MemMixForQuestionAnswering,
)


def register_generated_models(config_class):
    """Make the model classes of a configuration class and register them with the Auto classes, once."""
    generated_models.register(config_class, _KINDS)


def __getattr__(name: str):
    """Make a generated class by its name. Unpickling needs it in a process that has not made the class yet."""
    config_class = generated_models.config_class_of_model(name, _KINDS)
    if config_class is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    register_generated_models(config_class)
    return globals()[name]
