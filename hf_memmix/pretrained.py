"""What the base model and the models with a head share: which class is built, loading, the swap, options."""

from contextlib import contextmanager, nullcontext

from transformers import AutoModel

from ._transformers import (
    ConstructionHooks,
    DistributionHooks,
    drop_unmatched_rules,
    keep_in_fp32,
    model_class_of,
    name_in_plan,
)
from .mixers import ATTENTION, FeedForward, MemoryMixer
from .swap import fp32_patterns, set_mixer_options, swap_attention, swap_feed_forward
from .tensor_parallel import DividedModule, check_attention, check_mesh, divided_modules, set_aside, whole_tensors


class MemMixPreTrained(DistributionHooks, ConstructionHooks):
    """Base of all model classes with mixers. Goes before a native class."""

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
            ValueError: a mixer cannot use its parameters (`MemoryMixer.check_weights`); or tensor parallelism is asked
                for, and a mixer cannot be shared out (`MemoryMixer.tp_plan`), or FSDP or a pipeline is asked for, too.
        """
        if "config_class" not in cls.__dict__:
            return cls._auto_class_for.from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        loaded = super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        divided = divided_modules(model)
        for module in divided.values():
            module.finish()
        for path, module in model.named_modules():
            if isinstance(module, MemoryMixer):
                with divided[path].local_parameters() if path in divided else nullcontext():
                    module.check_weights()
        return loaded

    @contextmanager
    def sharding(self, ranks: int):
        """Tensor parallelism: mixers and their feed-forward layers are divided by their own plans."""
        check_mesh(self.config.distributed_config)
        if ATTENTION in self.config.mixer_types:
            check_attention(self.config, ranks)

        with set_aside(self, self.own_modules) as modules:
            drop_unmatched_rules(self)

            def divide_modules(mesh):
                for module in modules.values():
                    module.memmix_divided = DividedModule(module, mesh)
                name_in_plan(self, modules)

            yield divide_modules

    def whole_tensors(self, tensors):
        return whole_tensors(self, tensors)

    @classmethod
    def register_for_auto_class(cls, *args, **kwargs):
        """Nothing: after a load through `auto_map` the library calls this, to copy our sources at the next save."""

    def insert_mixers(self):
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
