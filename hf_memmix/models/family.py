"""Base class of the families that are trained from scratch: presets, the mixer of each layer, and registration.

A family is one file: its sizes and a configuration class over a backbone of transformers,

    @register_family
    class GKAConfig(FamilyConfig, Qwen3Config):
        model_type: ClassVar[str] = "memmix_gka"
        mixer: ClassVar[str] = "gka"
        presets: ClassVar[dict] = {"440m": {...}, ...}

from which `GKAModel`, `GKAForCausalLM` and the models with other heads are made on first use. Blocks, norms and
heads are the backbone's: x = x + mixer(norm(x)); x = x + mlp(norm(x)).
"""

from typing import ClassVar

from transformers import AutoConfig

from ..configuration_checks import check_sizes
from ..configuration_memmix import MemMixConfig
from ..errors import UserError
from ..mixers import ATTENTION

FAMILIES: dict[str, type["FamilyConfig"]] = {}
_HEADS = ("Model", "ForCausalLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")


def sizes(hidden: int, layers: int, heads: int, intermediate: int, **fields) -> dict:
    """The fields of a preset; `fields` add to them or replace them. `heads` are those of attention."""
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "intermediate_size": intermediate,
        "max_position_embeddings": 2048,
        "vocab_size": 32000,
        "tie_word_embeddings": True,
        **fields,
    }


class FamilyConfig(MemMixConfig):
    """Base class of the configurations of families. It stands before the backbone's configuration class.

    Args:
        attention_layers: layers that keep softmax attention; ignored if `mixer_types` is given.
        mixer_types, mixers: as in `MemMixConfig`; by default `layer_mixers()` in all other layers.
    """

    mixer: ClassVar[str]
    presets: ClassVar[dict[str, dict]] = {}

    attention_layers: list[int] | None = None

    def __post_init__(self, **kwargs):
        check_sizes(self)
        layers = range(self.num_hidden_layers)
        kept = self.attention_layers
        if kept is not None and not (isinstance(kept, (list, tuple)) and all(type(i) is int for i in kept)):
            raise UserError(f"attention_layers={kept!r} must be a list of layer indices, or None")
        if unknown := sorted(set(kept or ()) - set(layers)):
            raise UserError(f"attention_layers {unknown} do not exist: the model has {len(layers)} layers, from 0")
        if self.mixer_types is None:
            kinds = self.layer_mixers()
            self.mixer_types = [ATTENTION if i in (self.attention_layers or ()) else kinds[i] for i in layers]
        super().__post_init__(**kwargs)

    def layer_mixers(self) -> list[str]:
        """The mixer of each layer; a family with several mixers overrides it."""
        return [self.mixer] * self.num_hidden_layers

    @classmethod
    def preset(cls, name: str, **overrides) -> "FamilyConfig":
        """The configuration named `name` in `presets`, a size of the paper; `overrides` are fields.

        Raises:
            ValueError: there is no such preset.
        """
        if name not in cls.presets:
            raise UserError(f"unknown preset {name!r}; known: {sorted(cls.presets)}")
        return cls(**{**cls.presets[name], **overrides})

    @classmethod
    def _model_name(cls, native_name: str) -> str:
        return _prefix(cls) + native_name.removeprefix(_prefix(cls._backbone_class))


def register_family(cls):
    """Class decorator: register a family with AutoConfig, and its model names in `hf_memmix`.

    Raises:
        ValueError: the class does not subclass `FamilyConfig` and a configuration class of transformers.
    """
    backbones = [base for base in cls.__mro__ if base.__module__.startswith("transformers.models.")]
    if not (issubclass(cls, FamilyConfig) and backbones):
        raise UserError(
            f"{cls.__name__} must subclass FamilyConfig and a configuration of transformers, in this order"
        )
    cls._backbone_class, cls._models_module = backbones[0], __package__
    AutoConfig.register(cls.model_type, cls)
    FAMILIES[_prefix(cls)] = cls
    return cls


def family_of_model(name: str) -> type[FamilyConfig] | None:
    """The configuration class of a family by the name of one of its models, e.g. "GKAForCausalLM"."""
    return next((FAMILIES.get(name.removesuffix(head)) for head in reversed(_HEADS) if name.endswith(head)), None)


def _prefix(config_class: type) -> str:
    return config_class.__name__.removesuffix("Config")
