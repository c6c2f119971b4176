"""The configuration of a transformers decoder whose attention is replaced, in chosen layers, by memory mixers.

    config = memmix_config(AutoConfig.from_pretrained("Qwen/Qwen3-0.6B"), mixer_types=["gka"] * 27 + ["attention"])

The class is a subclass of the backbone's configuration class and adds three fields. In `config.json` all fields are on
one level:

    {"model_type": "memmix", "backbone_model_type": "qwen3", "mixer_types": ["attention", "gka", ...],
     "mixers": {"gka": {"solver_phases": [12, 10], ...}}, ...the backbone's fields...}

A configuration class is generated for each backbone on first use (`config_class_for`).
"""

import copy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

from ._transformers import CONFIG_MAPPING_NAMES, NAME_OF_WEIGHTS
from .configuration_checks import check_backbone, check_rope, check_sizes, check_without_rope
from .errors import UserError
from .frozen import FrozenDict, FrozenError, frozen, plain
from .mixers import ATTENTION, MIXERS
from .mixers.options import MixerOptions

REMOTE_STUB = '''"""Loads this checkpoint's classes from the package hf_memmix: `pip install .` in its checkout."""

from hf_memmix import (  # noqa: F401
    MemMixConfig,
    MemMixForCausalLM,
    MemMixForQuestionAnswering,
    MemMixForSequenceClassification,
    MemMixForTokenClassification,
    MemMixModel,
)
'''
_AUTO_MAP = {
    "AutoConfig": "modeling_memmix.MemMixConfig",
    "AutoModel": "modeling_memmix.MemMixModel",
    "AutoModelForCausalLM": "modeling_memmix.MemMixForCausalLM",
    "AutoModelForSequenceClassification": "modeling_memmix.MemMixForSequenceClassification",
    "AutoModelForTokenClassification": "modeling_memmix.MemMixForTokenClassification",
    "AutoModelForQuestionAnswering": "modeling_memmix.MemMixForQuestionAnswering",
}


# functions that make the model classes of a new configuration class. `hf_memmix` adds a function that imports the
# modelling code when it is called, so that this module does not import it
model_makers: list[Callable[[type], None]] = []


class MemMixConfig(PreTrainedConfig):
    """Base class of all memmix configurations. An instance has the generated class of its backbone.

    Args:
        backbone_model_type: `model_type` of the backbone, e.g. "qwen3".
        mixer_types: one entry per layer, "attention" (the backbone's own) or a name in `MIXERS`; None means attention
            in all layers.
        mixers: options by the name of the mixer. Missing options get their default values, which are saved too.
        attention_without_rope: attention layers whose queries and keys are not rotated; None: as in the backbone.

    After a model was built from it, these three fields are read-only. `model.set_mixer_options` changes those
    options that may be changed at inference.

    Raises:
        ValueError: the backbone is not supported, the length of `mixer_types` differs from the number of layers, or a
            mixer or an option is unknown.
    """

    model_type: ClassVar[str] = "memmix"
    _generic: ClassVar[bool] = True
    _models_module: ClassVar[str] = f"{__package__}.modeling_memmix"

    backbone_model_type: str | None = None
    mixer_types: list[str] | None = None
    mixers: dict[str, Any] | None = None
    attention_without_rope: list[int] | None = None

    def __new__(cls, *args, **kwargs):
        # MemMixConfig(...) itself returns an instance of the backbone's class
        if cls is MemMixConfig and kwargs.get("backbone_model_type") is not None:
            cls = config_class_for(kwargs["backbone_model_type"])
        return super().__new__(cls)

    def __post_init__(self, **kwargs):
        check_sizes(self)  # before the library, which divides by some of them
        super().__post_init__(**kwargs)
        if type(self).__dict__.get("_generic", False):
            return
        self.backbone_model_type = self._backbone_class.model_type
        self.validate_mixers()
        self._register_models()

    @classmethod
    def _register_models(cls):
        """Register the model classes with the Auto classes. A model is always built after its configuration."""
        for make_models in model_makers:
            make_models(cls)

    @classmethod
    def _model_name(cls, native_name: str) -> str:
        """The name of the model class made from a native one."""
        return f"MemMix{native_name}".replace("LMHeadModel", "ForCausalLM")

    def make_feed_forward(self, layer_idx: int):
        """A `FeedForward` that replaces a layer's MLP, or None for the backbone's MLP. A family may override it."""
        return None

    def validate_mixers(self):
        """Check `mixer_types` and `mixers`, add missing options. Called on creation, on saving and by every model."""
        check_backbone(self)
        check_sizes(self)
        check_rope(self)
        layers = self.num_hidden_layers
        kinds = [ATTENTION] * layers if self.mixer_types is None else self.mixer_types
        if not isinstance(kinds, (list, tuple)):
            raise UserError(f"mixer_types={kinds!r} must be a list with one entry per layer")
        kinds = list(kinds)
        if len(kinds) != layers:
            raise UserError(
                f"mixer_types has {len(kinds)} entries, but the model has {layers} layers; give one entry per layer"
            )
        if not isinstance(self.mixers or {}, dict):
            raise UserError(f"mixers={self.mixers!r} must be a dictionary from mixer names to dictionaries of options")
        mixers = plain(self.mixers or {})
        known = [ATTENTION, *MIXERS]
        for name in [*kinds, *mixers]:
            if name not in known or (name in mixers and name == ATTENTION):
                place = "mixer_types" if name in kinds else "mixers"
                raise UserError(f"unknown mixer {name!r} in {place}; known: {known}")
        for name in sorted(set(kinds) - {ATTENTION} | set(mixers)):
            try:
                mixers[name] = MIXERS[name].options_class.from_dict(mixers.get(name) or {}).to_dict()
            except ValueError as error:
                raise UserError(f"mixers[{name!r}]: {error}") from error
        if any(mixers[kind]["local_window"] for kind in set(kinds) - {ATTENTION}):
            # those of the windows beside memories are saved, too
            mixers.setdefault("window", MIXERS["window"].options_class().to_dict())
        check_without_rope(self, kinds)
        if self._is_frozen:
            return  # they are complete, because a model was built from them
        self.mixer_types, self.mixers = kinds, mixers
        self._complete_windows()
        self.attention_without_rope = self.attention_without_rope or None

    def _complete_windows(self):
        """Save the defaults of windows, which depend on their layers, if they are the same in all of them."""
        options = self.windows()
        found = {
            "window": {own.window for i, own in options.items() if self.mixer_types[i] == "window"},
            "sinks": {own.sinks for own in options.values()},
        }
        self.mixers.get("window", {}).update({name: own.pop() for name, own in found.items() if len(own) == 1})

    def windows(self) -> dict[int, MixerOptions]:
        """The options of the windows, alone or beside a memory, by layer, with the layer's defaults."""
        beside = {i: self.mixers[self.mixer_types[i]]["local_window"] for i in self.memory_layers}
        windows = [i for i in beside if self.mixer_types[i] == "window" or beside[i]]
        return {i: MIXERS["window"].options_of(self, i, beside[i]) for i in windows}

    @property
    def _is_frozen(self) -> bool:
        return isinstance(self.__dict__.get("mixers"), FrozenDict)

    def freeze_mixers(self):
        """Make `mixer_types` and `mixers` read-only; called by every model that is built from them."""
        self.replace_mixers(self.mixers)
        self.__dict__["mixer_types"] = frozen(self.mixer_types)
        self.__dict__["attention_without_rope"] = frozen(self.attention_without_rope)

    def of_a_new_model(self) -> "MemMixConfig":
        """This configuration, or a copy if another model was built from it: `set_mixer_options` changes one model."""
        if not self._is_frozen:
            return self
        own = copy.deepcopy(self)
        own.__dict__.update({name: plain(getattr(self, name)) for name in _READ_ONLY})
        return own

    def replace_mixers(self, mixers: dict[str, dict]):
        """Set the read-only options. Only `set_mixer_options` calls it, which also changes the layers."""
        self.__dict__["mixers"] = frozen(mixers)

    def __setattr__(self, name, value):
        if self._is_fixed(name) and value != getattr(self, name):
            raise FrozenError(_FIXED.format(name=name))
        super().__setattr__(name, value)

    def __delattr__(self, name):
        if self._is_fixed(name):
            raise FrozenError(_FIXED.format(name=name))
        super().__delattr__(name)

    def _is_fixed(self, name: str) -> bool:
        return name in _READ_ONLY and self._is_frozen

    @property
    def memory_layers(self) -> list[int]:
        """Indices of the memory layers: those with a mixer in place of attention."""
        return [i for i, kind in enumerate(self.mixer_types) if kind != ATTENTION]

    def backbone_config(self) -> PreTrainedConfig:
        """The configuration of the backbone without mixers."""
        fields = self.to_dict()
        for name in (*_OWN_FIELDS, "model_type", "architectures", "auto_map"):
            fields.pop(name, None)
        return self._backbone_class.from_dict(fields)

    def to_dict(self) -> dict[str, Any]:
        fields = super().to_dict()
        if fields.get("attention_without_rope") is None:  # most models do not need it
            fields.pop("attention_without_rope", None)
        return fields | {name: plain(fields[name]) for name in _READ_ONLY if name in fields}

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs):
        """As in transformers. `MemMixConfig.from_dict` returns an instance of the class of `model_type`.

        `from_pretrained(folder, mixers={"gka": {"solver_phases": [30]}})` changes the options that it names; the
        others keep the values of the folder.

        Raises:
            ValueError: a field has an impossible value, or `mixer_types` is missing.
        """
        if cls is MemMixConfig:
            kind = config_dict.get("model_type", cls.model_type)
            generated = kind == cls.model_type
            target = config_class_for(config_dict.get("backbone_model_type")) if generated else CONFIG_MAPPING[kind]
            return target.from_dict(config_dict, **kwargs)
        if cls.model_type == MemMixConfig.model_type and config_dict.get("mixer_types") is None:
            raise UserError(
                f"mixer_types is {'null' if 'mixer_types' in config_dict else 'missing'}: give a list with one entry"
                f' per layer, the name of its mixer or "{ATTENTION}"'
            )
        if isinstance(kwargs.get("mixers"), dict) and isinstance(config_dict.get("mixers"), dict):
            kwargs["mixers"] = _with_changes(config_dict["mixers"], kwargs["mixers"])
        try:
            return super().from_dict(config_dict, **kwargs)
        except StrictDataclassError as error:
            raise UserError(" ".join(str(error).split())) from None
        except (TypeError, AttributeError, KeyError, IndexError, ArithmeticError) as error:
            # the library raises these for a value of an unexpected type or size
            wrong_field = _wrong_field(super().from_dict, config_dict, error)
            if wrong_field is None:
                raise
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise UserError(
                f"{wrong_field}={config_dict[wrong_field]!r} is not a valid value for this model ({reason})"
            ) from error

    @classmethod
    def register_for_auto_class(cls, *args, **kwargs):
        """Nothing: after a load through `auto_map` the library calls this, to copy our sources at the next save."""

    def save_pretrained(self, save_directory, push_to_hub: bool = False, **kwargs):
        """Write config.json, and modeling_memmix.py, with which the model can be loaded without `import hf_memmix`.

        `save_pretrained` and `push_to_hub` of the models call this method too.
        """
        self.validate_mixers()
        self.auto_map = dict(_AUTO_MAP)
        folder = Path(save_directory)
        if not folder.is_file():
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "modeling_memmix.py").write_text(REMOTE_STUB, encoding="utf-8")
        super().save_pretrained(save_directory, push_to_hub=push_to_hub, **kwargs)


_FIXED = (
    "{name} cannot be changed: a model was built from this configuration and would not follow. Call"
    " model.set_mixer_options(...), or build a model from memmix_config(config, mixer_types=[...], mixers={{...}})"
)
_READ_ONLY = ("mixer_types", "mixers", "attention_without_rope")
_OWN_FIELDS = ("backbone_model_type", *_READ_ONLY)


def memmix_config(
    backbone_config: PreTrainedConfig,
    mixer_types: Sequence[str] | None = None,
    mixers: dict[str, dict] | None = None,
    attention_without_rope: list[int] | None = None,
) -> MemMixConfig:
    """The configuration of `backbone_config`'s model with mixers in place of attention.

    Args:
        backbone_config: configuration of a transformers decoder, or of a memmix model, whose mixers are ignored.
        mixer_types: one entry per layer, "attention" or the name of a mixer; None means attention in all layers.
        mixers: options by the name of the mixer.
        attention_without_rope: see `MemMixConfig`.

    Raises:
        ValueError: as in `MemMixConfig`.
    """
    if isinstance(backbone_config, MemMixConfig):
        backbone_config = backbone_config.backbone_config()
    check_backbone(backbone_config)
    fields = backbone_config.to_dict()
    for name in ("architectures", "auto_map", "model_type", NAME_OF_WEIGHTS):
        fields.pop(name, None)
    kinds = [ATTENTION] * backbone_config.num_hidden_layers if mixer_types is None else list(mixer_types)
    own = {"mixer_types": kinds, "mixers": plain(mixers), "attention_without_rope": attention_without_rope}
    return config_class_for(backbone_config.model_type).from_dict({**fields, **own})


def _with_changes(mixers: dict[str, dict], changes: dict[str, dict]) -> dict[str, dict]:
    """Options by the name of the mixer, of which `changes` replaces those that it names."""
    mixers = dict(mixers)
    for name, options in changes.items():
        before = mixers.get(name)
        if name in MIXERS and isinstance(before, dict) and isinstance(options, dict):
            options = {**before, **options}
        mixers[name] = options
    return mixers


def lora_target_modules(model_or_config) -> list[str]:
    """Names of the modules that LoRA adapts by default, for `peft.LoraConfig(target_modules=...)`.

    These are the modules that each mixer of the model declares, and q_proj and v_proj of kept attention layers.

    Args:
        model_or_config: a memmix model, or its configuration.

    Raises:
        ValueError: it is neither.
    """
    config = getattr(model_or_config, "config", model_or_config)
    if not isinstance(config, MemMixConfig):
        raise UserError(f"{type(model_or_config).__name__} is no memmix model or configuration; ask PEFT for its own")
    kinds = {*config.mixer_types, *(["window"] if config.windows() else [])}  # also beside a memory
    mixers = [MIXERS[kind] for kind in kinds - {ATTENTION}]
    kept = {"q_proj", "v_proj"} if ATTENTION in config.mixer_types else set()
    return sorted(kept.union(*(mixer.lora_targets for mixer in mixers)))


def _wrong_field(load, fields: dict[str, Any], error: Exception) -> str | None:
    """The field that makes `load(fields)` fail: without it the call works, or with it alone the same error occurs."""

    def failure(fields):
        try:
            load(fields)
        except Exception as found:
            return type(found)

    for name in fields:
        if failure({key: value for key, value in fields.items() if key != name}) is None:
            return name
    return next((name for name, value in fields.items() if failure({name: value}) is type(error)), None)


# ---- generated classes


def config_class_for(backbone_model_type: str | None) -> type[MemMixConfig]:
    """The configuration class `MemMix<Family>Config` of a backbone, made on first use.

    Raises:
        ValueError: transformers has no such model type.
    """
    if not isinstance(backbone_model_type, str) or backbone_model_type not in CONFIG_MAPPING_NAMES:
        raise UserError(
            f"backbone_model_type={backbone_model_type!r} is not a model type of this transformers version; build the"
            " configuration with memmix_config(backbone_config, mixer_types=[...])"
        )
    backbone = CONFIG_MAPPING[backbone_model_type]
    name = f"MemMix{backbone.__name__.removesuffix('Config')}Config"
    module = sys.modules[__name__]
    if name not in vars(module):
        namespace = {
            "__module__": __name__,
            "__doc__": f"`{backbone.__name__}` with memory mixers; see `MemMixConfig`.",
            "__annotations__": {},
            "_generic": False,
            "_backbone_class": backbone,
        }
        setattr(module, name, type(MemMixConfig)(name, (MemMixConfig, backbone), namespace))
    return vars(module)[name]


def __getattr__(name: str):
    """Make a generated class by its name. Unpickling needs it in a process that has not made the class yet."""
    for model_type, config_name in CONFIG_MAPPING_NAMES.items():
        if name == f"MemMix{config_name}":
            return config_class_for(model_type)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


AutoConfig.register(MemMixConfig.model_type, MemMixConfig)
