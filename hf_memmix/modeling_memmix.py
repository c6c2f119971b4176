"""transformers' decoders with memory mixers in place of attention in chosen layers.

`MemMixModel` and `MemMixForCausalLM` are mixed into the family's own classes: `MemMixLlamaForCausalLM` *is* a
`LlamaForCausalLM`, so norms, MLPs, rotary embeddings, soft-caps, weight names and generate() stay transformers' own.
The classes of a backbone are made and registered with the Auto classes when its configuration is first used
(`generated_models.py`).

    model = AutoModelForCausalLM.from_pretrained(folder)                 # after `import hf_memmix`
    model = AutoModelForCausalLM.from_config(memmix_config(backbone, mixer_types=[...]))
"""

from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from . import generated_models
from ._transformers import ConstructionHooks, change_class, keep_in_fp32, model_class_of
from .cache import RecurrentStateCache, adopt_cache, cast_cache, check_hidden, check_rows, static_length_of
from .generation import MemoryGeneration
from .mixers import ATTENTION, FeedForward, MemoryMixer
from .padding import PaddedRows, check_finite, check_new_mask, packing_of, padding_of, positions_in
from .swap import fp32_patterns, memory_mixers, set_mixer_options, swap_attention, swap_feed_forward


class _MemMixPreTrained(ConstructionHooks):
    """What the base model and the models with a head share. Goes before a native class."""

    own_modules = (FeedForward, MemoryMixer)
    _auto_class_for = AutoModel

    @classmethod
    def concrete_class(cls, config) -> type:
        """The bare class stands for all: the one to build is that of the configuration."""
        if "config_class" in cls.__dict__:
            return cls
        found = model_class_of(type(config), cls._auto_class_for)
        if found is None:
            raise ValueError(
                f"{type(config).__name__} has no {cls.__name__}; give a configuration of memmix_config(...)"
            )
        return found

    def __new__(cls, config=None, *args, **kwargs):
        return super().__new__(cls if config is None else cls.concrete_class(config))

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
    def register_for_auto_class(cls, *args, **kwargs):
        """Nothing: after a load through `auto_map` the library calls this, to copy our sources at the next save."""

    def _insert_mixers(self):
        """Swap the attention (and feed-forward) of a base model and finish its construction anew."""
        swap_attention(self, self.config)
        swap_feed_forward(self, self.config)
        keep_in_fp32(self, fp32_patterns(self))
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


class MemMixModel(_MemMixPreTrained):
    """A base model with mixers: `MemMixModel(config)` and `MemMixModel.from_pretrained(folder)` build any family's.

    forward() takes what the native model takes. Beside a 2D `attention_mask` (padding of any pattern) it understands
    packed sequences: `cu_seq_lens_q`, `seq_idx` [B, T], or `position_ids` that start again.
    """

    def __init__(self, config):
        super().__init__(config)
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
        checkpoints = self.training and getattr(self, "gradient_checkpointing", False)
        if given is not None and checkpoints:
            raise ValueError(
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
        super().__init__(config)
        base = getattr(self, self.base_model_prefix)
        if not isinstance(base, MemMixModel):
            change_class(base, model_class_of(type(config), AutoModel))
            base._insert_mixers()
        self.post_init()


class MemMixForCausalLM(MemoryGeneration, _WithHead):
    """A causal language model with mixers, with all of generate(); see `MemMixModel`."""

    _auto_class_for = AutoModelForCausalLM


class MemMixForSequenceClassification(_WithHead):
    """A sequence classifier with mixers; see `MemMixModel`."""

    _auto_class_for = AutoModelForSequenceClassification


_KINDS = (MemMixModel, MemMixForCausalLM, MemMixForSequenceClassification)


def register_generated_models(config_class):
    """Make the model classes of a configuration class and register them with the Auto classes, once."""
    generated_models.register(config_class, _KINDS)


def __getattr__(name: str):
    """Make a generated class from its name again: pickles are loaded in processes that have not made it yet."""
    config_class = generated_models.config_class_of_model(name, _KINDS)
    if config_class is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    register_generated_models(config_class)
    return globals()[name]
