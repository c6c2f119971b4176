"""transformers' decoders with memory mixers in place of attention in chosen layers.

`MemMixModel` and `MemMixForCausalLM` are mixed into the family's own classes: `MemMixLlamaForCausalLM` *is* a
`LlamaForCausalLM`, so norms, MLPs, rotary embeddings, soft-caps, weight names and generate() stay transformers' own.
The classes of a backbone are made and registered with the Auto classes when its configuration is first used.

    model = AutoModelForCausalLM.from_pretrained(folder)                 # after `import hf_memmix`
    model = AutoModelForCausalLM.from_config(memmix_config(backbone, mixer_types=[...]))
"""

import sys

import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    MODEL_MAPPING,
    MODEL_MAPPING_NAMES,
)
from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

from .cache import RecurrentStateCache, adopt_cache, cast_cache, check_hidden, check_rows, static_length_of
from .configuration_memmix import MemMixConfig, config_class_for
from .finished_rows import FinishedRows, feeds_pads
from .mixers import ATTENTION, FeedForward, MemoryMixer
from .padding import PaddedRows, check_finite, check_new_mask, packing_of, padding_of, positions_in
from .swap import (
    decoder_layers,
    execution_device,
    fp32_patterns,
    memory_mixers,
    set_mixer_options,
    swap_attention,
    swap_feed_forward,
)


class _MemMixPreTrained:
    """What the base model and the models with a head share. Goes before a native class."""

    # recurrent layers roll back exactly, so assisted and prompt-lookup decoding need not be refused
    _is_stateful = False
    _auto_class_for = AutoModel

    def __new__(cls, config=None, *args, **kwargs):
        # the bare class stands for all: it builds a model of the configuration's own class
        if "config_class" not in cls.__dict__ and config is not None:
            cls = cls._auto_class_for._model_mapping[type(config)]
        return super().__new__(cls)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, **kwargs):
        """As in transformers; the bare classes load the class that the checkpoint names.

        Raises:
            ValueError: tensor parallelism is asked for, whose plans do not know the mixers; or a mixer cannot use
                its parameters (`MemoryMixer.check_weights`).
        """
        distributed = kwargs.get("distributed_config")
        sharded = [kwargs.get("tp_plan"), kwargs.get("tp_size"), getattr(distributed, "tp_size", None)]
        if any(value not in (None, 1) for value in sharded):
            raise ValueError("memory mixers have no tensor-parallel plan; use device_map, FSDP or data parallelism")
        if "config_class" not in cls.__dict__:
            return cls._auto_class_for.from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        loaded = super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        for mixer in memory_mixers(loaded[0] if isinstance(loaded, tuple) else loaded).values():
            mixer.check_weights()
        return loaded

    @classmethod
    def _from_config(cls, config, **kwargs):
        if "config_class" not in cls.__dict__:
            return cls._auto_class_for.from_config(config, **kwargs)
        return super()._from_config(config, **kwargs)

    @classmethod
    def register_for_auto_class(cls, *args, **kwargs):
        """Nothing: after a load through `auto_map` the library calls this, to copy our sources at the next save."""

    @torch.no_grad()
    def _init_weights(self, module):
        super()._init_weights(module)
        if isinstance(module, (FeedForward, MemoryMixer)):
            module.init_weights()

    def _initialize_weights(self, module, *args, **kwargs):
        # the library passes over a module that has parameters in its children alone
        if isinstance(module, (FeedForward, MemoryMixer)) and not getattr(module, "_is_hf_initialized", False):
            self._init_weights(module)
            module._is_hf_initialized = True
        super()._initialize_weights(module, *args, **kwargs)

    def _insert_mixers(self):
        """Swap the attention (and feed-forward) of a base model and finish its construction anew."""
        swap_attention(self, self.config)
        swap_feed_forward(self, self.config)
        strict = set(self._keep_in_fp32_modules_strict or ()) | fp32_patterns(self)
        self._keep_in_fp32_modules_strict = strict
        # filled per class by the constructor: without it, a change of class silently ends output_hidden_states
        dict.__setitem__(_CAN_RECORD_REGISTRY, str(type(self)), self._can_record_outputs)
        self.post_init()

    def set_mixer_options(self, mixer: str | None = None, /, **options):
        """Change options in the layers and the configuration together, so that what is saved is what runs.

            model.set_mixer_options(solver_phases=[21])
            model.set_mixer_options("gka", chunk_size=32)

        Only options that can be changed at inference (`inference_options` of the mixer's options class) are taken.

        Args:
            mixer: name of the mixer; None changes all mixers of the model that have the option.
            options: values by name.

        Raises:
            ValueError: the model has no such mixer or option, it cannot be changed, or its value is out of range;
                nothing is changed then.
        """
        set_mixer_options(self, self.config, mixer, options)

    @classmethod
    def _native(cls):
        return next(base for base in cls.__mro__ if base.__module__.startswith("transformers.models."))

    # the library looks for both in the source of `cls.__module__`: ask the class whose source it should read

    @classmethod
    def _can_set_attn_implementation(cls):
        return cls._native()._can_set_attn_implementation()

    @classmethod
    def _can_set_experts_implementation(cls):
        return cls._native()._can_set_experts_implementation()


class MemMixModel(_MemMixPreTrained):
    """A base model with mixers: `MemMixModel(config)` and `MemMixModel.from_pretrained(folder)` build any family's.

    forward() takes what the native model takes. Beside a 2D `attention_mask` (padding of any pattern) it understands
    packed sequences: `cu_seq_lens_q`, `seq_idx` [B, T], or `position_ids` that start again.
    """

    def __init__(self, config):
        super().__init__(config.of_a_new_model())
        self._insert_mixers()

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
        if inputs_embeds is not None:
            check_finite(inputs_embeds)
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        batch, length = (input_ids if input_ids is not None else inputs_embeds).shape[:2]
        if batch * length == 0:
            raise ValueError(f"the input holds no token: {batch} rows of {length}; a forward needs at least one")
        given = past_key_values
        # each layer decides by its own mode
        checkpoints = any(
            m.training and getattr(m, "gradient_checkpointing", False) for m in (self, *decoder_layers(self))
        )
        if given is not None and checkpoints:
            raise ValueError(
                "gradient checkpointing in train mode runs the layers without their cache, which would neither be"
                " read nor filled: call model.eval() or model.gradient_checkpointing_disable(), or leave"
                " past_key_values out"
            )
        adopt_cache(given, self.config)
        check_rows(given, batch)

        if "memmix_mask" in kwargs:
            mask = check_new_mask(kwargs.pop("memmix_mask"), batch, length)
        else:
            seen = 0 if given is None else given.get_seq_length()
            mask = padding_of(attention_mask, batch, length, seen, static_length_of(given) is not None)
            # without a mask the memories still know their pads; attention would see them
            if attention_mask is not None or ATTENTION in self.config.mixer_types:
                check_hidden(given, attention_mask)
        resetting = position_ids if given is None and mask is None else None
        boundaries = packing_of(kwargs.get("cu_seq_lens_q"), kwargs.pop("seq_idx", None), resetting, batch, length)
        if boundaries is not None:
            if mask is not None or given is not None or use_cache:
                what = "a padding mask" if mask is not None else "a cache"
                raise ValueError(f"packed sequences cannot be combined with {what}; drop one of the two")
            # attention layers that are kept see the packing through the positions
            position_ids = positions_in(boundaries, batch, length) if position_ids is None else position_ids
            attention_mask, use_cache = None, False
        # sorted once for all layers; always both keys, even None: a key that comes and goes would recompile
        rows = None if mask is None else PaddedRows.of(mask)
        kwargs |= {"memmix_rows": rows, "memmix_cu_seqlens": boundaries}

        use_cache = (self.config.use_cache if use_cache is None else use_cache) and not checkpoints
        if use_cache and past_key_values is None:
            past_key_values = RecurrentStateCache(self.config)
        if past_key_values is not None:
            self._take_over_dtype(past_key_values)
        return super().forward(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )

    def _take_over_dtype(self, cache):
        """Cast what a model of another dtype has left in a cache to what this one would have left."""
        before = getattr(cache, "memmix_dtype", None)
        if before == self.dtype:
            return
        cache.memmix_dtype = self.dtype
        if before is not None:
            shapes = {i: mixer.state_shapes(1, self.dtype) for i, mixer in memory_mixers(self).items()}
            dtypes = {i: {name: dtype for name, (_, dtype) in named.items()} for i, named in shapes.items()}
            cast_cache(cache, self.dtype, dtypes)


class _WithHead(_MemMixPreTrained):
    """A model with a head on a base model: the native constructor runs once, then its base model changes class."""

    def __init__(self, config):
        super().__init__(config.of_a_new_model())
        base = getattr(self, self.base_model_prefix)
        if not isinstance(base, MemMixModel):
            base.__class__ = MODEL_MAPPING[type(config)]
            base._insert_mixers()
        self.post_init()


class MemMixForCausalLM(_WithHead):
    """A causal language model with mixers, with all of generate(); see `MemMixModel`."""

    _auto_class_for = AutoModelForCausalLM

    def _prepare_cache_for_generation(self, generation_config, model_kwargs, *args, **kwargs):
        user_made = model_kwargs.get("past_key_values") is not None
        super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)
        cache = model_kwargs.get("past_key_values")
        if cache is None:
            return
        if user_made:
            adopt_cache(cache, self.config)
        else:
            cache = model_kwargs["past_key_values"] = RecurrentStateCache.from_cache(cache, self.config)
            batch = args[1] if len(args) > 1 else kwargs["batch_size"]
            if cache.static_length is not None:
                rows = batch * max(generation_config.num_beams, generation_config.num_return_sequences)
                self._allocate_states(cache, rows)
        if getattr(generation_config, "is_assistant", False):
            cache.activate_past_recording()  # the layers that were replaced had been told before

    def _get_static_cache_init_shape(self):
        """The library's, which allocates a static cache before a chunked prefill; without keys and values where there
        are memories, whose cache layers are replaced right after.
        """
        shape = super()._get_static_cache_init_shape()
        if shape is None:
            return None
        heads, head_dim = shape
        kinds = self.config.mixer_types
        heads = [heads] * len(kinds) if isinstance(heads, int) else heads
        return [n if kind == ATTENTION else 0 for n, kind in zip(heads, kinds, strict=True)], head_dim

    def _allocate_states(self, cache, batch: int):
        """A place for the states at fixed addresses, before a compiled forward could be the first to make them."""
        for i, mixer in memory_mixers(self).items():
            cache.layers[i].allocate(mixer.allocate_states(batch, execution_device(mixer), self.dtype))

    def _sample(self, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs):
        cache = kwargs.get("past_key_values")
        outlives = generation_config.return_dict_in_generate or getattr(cache, "_is_user_defined", False)
        if cache is None or not outlives or len(input_ids) == 1 or not feeds_pads(stopping_criteria):
            return super()._sample(input_ids, logits_processor, stopping_criteria, generation_config, **kwargs)
        rows = FinishedRows(stopping_criteria, cache)
        try:
            return super()._sample(input_ids, logits_processor, rows, generation_config, **kwargs)
        finally:
            rows.put_back()

    def _assisted_decoding(self, *args, **kwargs):
        cache = kwargs.get("past_key_values")
        if cache is not None and (seen := int(cache.get_seq_length())):
            # the library would feed the whole prompt on top of them, here and in its own models
            raise ValueError(
                f"assisted and prompt-lookup decoding start from an empty cache, this one holds {seen} tokens; leave"
                " past_key_values out, or decode without assistance"
            )
        try:
            return super()._assisted_decoding(*args, **kwargs)
        finally:
            if isinstance(cache, RecurrentStateCache):
                cache.stop_past_recording()  # a long text after it would pile up snapshots

    def _prefill(self, input_ids, generation_config, model_kwargs, *args, **kwargs):
        # transformers 5.17 does not tell the later chunks of a prompt from decode steps
        model_kwargs["memmix_prefill"] = True
        try:
            return super()._prefill(input_ids, generation_config, model_kwargs, *args, **kwargs)
        finally:
            del model_kwargs["memmix_prefill"]

    # the var-keyword must be spelled `kwargs`: generate() looks for that name to see what the model accepts
    def prepare_inputs_for_generation(self, input_ids, attention_mask=None, inputs_embeds=None, **kwargs):
        prefill = kwargs.pop("memmix_prefill", kwargs.get("is_first_iteration"))
        inputs = super().prepare_inputs_for_generation(
            input_ids, attention_mask=attention_mask, inputs_embeds=inputs_embeds, **kwargs
        )
        tokens, cache = inputs.get("input_ids"), inputs.get("past_key_values")
        batch, length = (tokens if tokens is not None else inputs["inputs_embeds"]).shape[:2]
        compileable = cache is not None and cache.is_compileable
        if length == 1 and not prefill:
            inputs["memmix_mask"] = None  # a new token is real
            return inputs
        if compileable or attention_mask is None:
            check_hidden(cache, attention_mask)
        if compileable:
            # the 2D mask has become a 4D one or a dict: the mixers need the padding itself. Of any other cache forward
            # reads the mask in hand, which may have grown by then (PEFT's prompt tuning puts tokens in front)
            seen, static = cache.get_seq_length(), static_length_of(cache) is not None
            mask = padding_of(attention_mask, batch, length, seen, static)
            inputs["memmix_mask"] = None if mask is None else mask.contiguous()
        return inputs

    def generate_batch(self, *args, **kwargs):
        raise ValueError(
            "continuous batching (generate_batch) has a paged cache, which cannot hold recurrent states; call"
            " generate() with a padded batch"
        )


class MemMixForSequenceClassification(_WithHead):
    """A sequence classifier with mixers; see `MemMixModel`."""

    _auto_class_for = AutoModelForSequenceClassification


# ---- generated classes

_HEADS = (
    (AutoModel, MODEL_MAPPING, MODEL_MAPPING_NAMES, MemMixModel),
    (AutoModelForCausalLM, MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MemMixForCausalLM),
    (
        AutoModelForSequenceClassification,
        MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
        MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
        MemMixForSequenceClassification,
    ),
)


def register_generated_models(config_class):
    """Make the model classes of a configuration class and register them with the Auto classes, once."""
    backbone, module = config_class._backbone_class, sys.modules[config_class._models_module]
    for auto_class, mapping, _, mixin in _HEADS:
        if backbone not in mapping:
            continue
        native = mapping[backbone]
        name = config_class._model_name(native.__name__)
        if name in vars(module):
            continue
        namespace = {
            "__module__": module.__name__,
            "__doc__": f"`{native.__name__}` with memory mixers; see `{mixin.__name__}`.",
            "config_class": config_class,
        }
        model_class = type(name, (mixin, native), namespace)
        setattr(module, name, model_class)
        _register_model(auto_class, config_class, model_class, native)


def _register_model(auto_class, config_class, model_class, native):
    """Register a model class, with the renames and merges of checkpoint tensors that the native class has."""
    auto_class.register(config_class, model_class)
    mapping = get_checkpoint_conversion_mapping(native.__name__)
    if mapping is None:
        mapping = get_checkpoint_conversion_mapping(config_class._backbone_class.model_type)
    if mapping:
        register_checkpoint_conversion_mapping(model_class.__name__, mapping, overwrite=True)


def __getattr__(name: str):
    """Make a generated class from its name again: pickles are loaded in processes that have not made it yet."""
    for _, _, names, _ in _HEADS:
        for model_type, native_name in names.items():
            if isinstance(native_name, str) and name == MemMixConfig._model_name(native_name):
                register_generated_models(config_class_for(model_type))
                return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
