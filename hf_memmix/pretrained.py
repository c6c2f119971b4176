"""Base class of the base model and the models with a head: which class is built, loading, mixers and their options."""

from transformers import AutoModel, PreTrainedConfig

from ._model_hooks import ConstructionHooks
from ._transformers import drop_unmatched_rules, keep_in_fp32, model_class_of
from .errors import UserError
from .fused_layers import fuse_layers
from .mixers import FeedForward, MemoryMixer
from .quantization import leave_steering_alone
from .swap import fp32_patterns, layers_name, set_mixer_options, swap_attention, swap_feed_forward
from .tensor_parallel import TensorParallelModel
from .training_length import training_lengths

# arguments of `from_pretrained` that say where the files of a model are
_WHERE = ("subfolder", "revision", "cache_dir", "token", "local_files_only", "force_download", "proxies")


class MemMixPreTrained(TensorParallelModel, ConstructionHooks):
    """Base of all model classes with mixers. Goes before a native class."""

    own_modules = (FeedForward, MemoryMixer)
    _auto_class_for = AutoModel
    _takes_cache = True  # whether the forward of the native class has a cache among its arguments

    @classmethod
    def concrete_class(cls, config) -> type:
        """This class; for a general class such as `MemMixModel`, the class for the configuration's backbone."""
        if "config_class" in cls.__dict__:
            return cls
        found = model_class_of(type(config), cls._auto_class_for)
        if found is None:
            raise UserError(
                f"{type(config).__name__} has no {cls.__name__}; give a configuration of memmix_config(...)"
            )
        return found

    def __new__(cls, config=None, *args, **kwargs):
        return super().__new__(cls if config is None else cls.concrete_class(config))

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, **kwargs):
        """As in transformers. The general classes (`MemMixModel`...) return the class of the checkpoint's backbone.

        With `quantization_config`, layers that steer a memory are not quantised (`hf_memmix.quantization`).

        Raises:
            ValueError: the quantiser is not supported; a mixer cannot use its parameters
                (`MemoryMixer.check_weights`); or `distributed_config` asks for tensor parallelism and a mixer cannot
                be divided (`MemoryMixer.tp_plan`), or it also asks for FSDP or a pipeline.
        """
        if "config_class" not in cls.__dict__:
            return cls._auto_class_for.from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        if (quantization := kwargs.get("quantization_config")) is not None:
            config = kwargs.get("config")
            if not isinstance(config, PreTrainedConfig):
                # of the same folder and revision as the weights, or it may name layers that they do not have
                where = {name: kwargs[name] for name in _WHERE if name in kwargs}
                config = cls.config_class.from_pretrained(config or pretrained_model_name_or_path, **where)
            if getattr(config, "quantization_config", None) is None:  # else the checkpoint names the layers already
                kwargs["quantization_config"] = leave_steering_alone(quantization, cls, config)
        loaded = super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        for mixer in model.ready_mixers():
            mixer.check_weights()
        return loaded

    @classmethod
    def register_for_auto_class(cls, *args, **kwargs):
        """Nothing: after a load through `auto_map` the library calls this, to copy our sources at the next save."""

    def insert_mixers(self):
        """Swap the attention (and feed-forward) of a base model and finish its construction anew."""
        self._layers_name = layers_name(self)  # each forward needs it: looked up once
        swap_attention(self, self.config)
        swap_feed_forward(self, self.config)
        fuse_layers(self)
        keep_in_fp32(self, fp32_patterns(self))
        self.training_lengths = training_lengths(self)
        self.post_init()

    def post_init(self):
        """As in transformers; the tensor-parallel plan loses the rules for projections that a mixer does not have."""
        super().post_init()
        ours = [path for path, module in self.named_modules() if isinstance(module, self.own_modules)]
        drop_unmatched_rules(self, inside={path.rpartition(".")[2] for path in ours})

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
