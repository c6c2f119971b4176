"""transformers' decoders with memory mixers in place of attention in chosen layers.

`MemMixModel` and `MemMixForCausalLM` are mixed into the family's own classes: `MemMixLlamaForCausalLM` *is* a
`LlamaForCausalLM`, so norms, MLPs, rotary embeddings, soft-caps, weight names and generate() stay transformers' own.
The classes of a backbone are made and registered with the Auto classes when its configuration is first used
(`generated_models.py`).

    model = AutoModelForCausalLM.from_pretrained(folder)                 # after `import hf_memmix`
    model = AutoModelForCausalLM.from_config(memmix_config(backbone, mixer_types=[...]))
"""

import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel

from . import generated_models
from ._generation_hooks import CACHE
from ._transformers import change_class, model_class_of
from .cache import RecurrentStateCache, adopt_cache, cast_cache, check_hidden, check_rows, static_length_of
from .context_parallel import (
    current_group,
    keep_masks,
    refuse_pooling,
    refuse_sequence_parallelism,
    split_loss,
    split_of,
)
from .errors import UserError
from .generation import NO_CONTINUOUS_BATCHING, MemoryGeneration
from .given_cache import cache_among
from .mixers import ATTENTION
from .padding import (
    PaddedRows,
    check_finite,
    check_new_mask,
    check_one_sequence,
    packing_of,
    padding_of,
    positions_in,
    positions_without_pads,
)
from .pretrained import MemMixPreTrained
from .swap import memory_mixers
from .training_length import check_training_length


class MemMixModel(MemMixPreTrained):
    """A base model with mixers: `MemMixModel(config)` and `MemMixModel.from_pretrained(folder)` build any family's.

    forward() has the arguments of the native model. The 2D `attention_mask` [B, T] may hide tokens in any pattern.
    Packed sequences are given by `cu_seq_lens_q`, `seq_idx` [B, T], or `position_ids` that start at 0 again.
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
            position_ids: [B, T]; by default pads have no position.
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
        if (named := kwargs.pop("cache", None)) is not None:
            if past_key_values is not None:
                raise UserError("cache and past_key_values are two names of one argument: give one of them")
            past_key_values = named
        cache_among(kwargs, (CACHE,))
        if inputs_embeds is not None:
            check_finite(inputs_embeds)
        if (input_ids is None) == (inputs_embeds is None):
            raise UserError("give either input_ids or inputs_embeds")
        tokens = input_ids if input_ids is not None else inputs_embeds
        batch, length = tokens.shape[:2]
        # of split sequences a process may have no token, and all processes must raise the error: `split_of`
        if batch == 0 or (length == 0 and current_group() is None):
            raise UserError(f"the input has no tokens: {batch} rows of {length}; give at least one row of one token")
        if "read_index" in kwargs:  # the addresses in the paged cache of a `ContinuousBatchingManager`
            raise UserError(NO_CONTINUOUS_BATCHING)
        given = past_key_values
        checkpoints = self._checkpoints_activations()
        if given is not None and checkpoints:
            raise UserError(
                "gradient checkpointing in train mode runs the layers without their cache, which would neither be"
                " read nor filled: call model.eval() or model.gradient_checkpointing_disable(), or leave"
                " past_key_values out"
            )
        if given is not None:
            adopt_cache(given, self.config)
            check_rows(given, batch)

        if "memmix_mask" in kwargs:
            mask = check_new_mask(kwargs.pop("memmix_mask"), batch, length)
        else:
            seen = 0 if given is None else given.get_seq_length()
            mask = padding_of(attention_mask, batch, length, seen, static_length_of(given) is not None)
            # states never contain pads, but attention layers would read the pads if the mask is missing
            if attention_mask is not None or ATTENTION in self.config.mixer_types:
                check_hidden(given, attention_mask)
        keep_masks(getattr(self, self._layers_name))
        if self.training:  # in evaluation, DeepSpeed gives every process whole sequences
            refuse_sequence_parallelism()
        group = current_group()
        resetting = position_ids if given is None and mask is None and group is None else None
        if group is None and length > 1 and (mask is not None or given is not None):
            check_one_sequence(position_ids, mask, given is not None)
        boundaries = packing_of(kwargs.get("cu_seq_lens_q"), kwargs.pop("seq_idx", None), resetting, batch, length)
        ranks = None
        if group is not None:
            if given is not None or use_cache or boundaries is not None:
                raise UserError(
                    "context parallelism cannot be combined with packed sequences or a cache: give one sequence per"
                    " row, with use_cache=False, and call generate() outside of its context"
                )
            ranks = split_of(group, self.config, memory_mixers(self).values(), position_ids, batch, length, mask)
            # without a mask, the library takes positions that jump for packed sequences and makes a mask of [T, T]
            attention_mask, use_cache = position_ids.new_ones(batch, length), False
        if boundaries is not None:
            if mask is not None or given is not None or use_cache:
                what = "a padding mask" if mask is not None else "a cache"
                raise UserError(f"packed sequences cannot be combined with {what}; drop one of the two")
            # kept attention layers recognise packed sequences by the positions
            position_ids = positions_in(boundaries, batch, length) if position_ids is None else position_ids
            attention_mask, use_cache = None, False
        elif position_ids is None and any(kind != ATTENTION for kind in self.config.mixer_types):
            layer = None if given is None else given.memmix_layer
            position_ids = positions_without_pads(mask, layer, tokens)
        # sorted once for all layers. Both keys are always present: torch.compile would recompile if they changed
        rows = None if mask is None else PaddedRows.of(mask)
        if self.training_lengths and self.training and given is None and torch.is_grad_enabled():
            check_training_length(self, length if ranks is None else ranks.tokens(), rows, boundaries)
        use_cache = (self.config.use_cache if use_cache is None else use_cache) and not checkpoints
        if use_cache and past_key_values is None:
            past_key_values = RecurrentStateCache(self.config)
        if past_key_values is not None:
            self._take_over_dtype(past_key_values)
        kwargs |= {"memmix_rows": rows, "memmix_cu_seqlens": boundaries, "memmix_ranks": ranks}
        return super().forward(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            memmix_cached=past_key_values is not None,
            **{CACHE: past_key_values},
            **kwargs,
        )

    def _take_over_dtype(self, cache):
        """Cast a cache that was filled by a model of another dtype to the dtypes of this model."""
        before = getattr(cache, "memmix_dtype", None)
        if before == self.dtype:
            return
        cache.memmix_dtype = self.dtype
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


class MemMixForSequenceClassification(_WithHead):
    """A sequence classifier with mixers; see `MemMixModel`."""

    _auto_class_for = AutoModelForSequenceClassification

    def __init__(self, config):
        super().__init__(config)
        self.register_forward_pre_hook(refuse_pooling)


_KINDS = (MemMixModel, MemMixForCausalLM, MemMixForSequenceClassification)


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
