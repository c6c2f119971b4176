"""Options of a mixer: a strict dataclass of huggingface_hub. Each field declares which values are allowed, and why.

    @mixer_options
    class GKAOptions(MixerOptions):
        ridge: float | int = between(0.02, 1e-7, 100, "the paper's is 0.02")

Types and bounds hold on creation and on assignment; methods `validate_...` check several options together.
"""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict, validated_field
from huggingface_hub.errors import StrictDataclassClassValidationError, StrictDataclassFieldValidationError

from ..errors import UserError

# bounds that several mixers share
LARGEST_CHUNK = 8192  # all pairs of tokens of a chunk are computed at once
LARGEST_WINDOW = 65536  # tokens


def mixer_options(cls: type) -> type:
    """Class decorator: make a strict dataclass whose errors are a ValueError of one line that names the option."""
    cls = strict(dataclasses.dataclass(cls))
    strict_init, strict_setattr = cls.__init__, cls.__setattr__

    def __init__(self, *args, **kwargs):
        try:
            strict_init(self, *args, **kwargs)
        except StrictDataclassClassValidationError as error:
            raise UserError(str(error.__cause__)) from None

    def __setattr__(self, name, value):
        value = list(value) if isinstance(value, tuple) else value
        try:
            strict_setattr(self, name, value)
        except StrictDataclassFieldValidationError as error:
            reason = str(error.__cause__)
            if isinstance(error.__cause__, TypeError):
                kind = cls.__dataclass_fields__[name].type
                reason = f"must be of type {kind.__name__ if isinstance(kind, type) else kind}"
            raise UserError(f"{name}={value!r} {reason}") from None
        self.__dict__.setdefault("plain", {})[name] = dict(enumerate(value)) if isinstance(value, list) else value

    cls.__init__, cls.__setattr__ = __init__, __setattr__
    return cls


def between(default: Any, low: float, high: float, why: str = ""):
    """A field whose value is None or a number from `low` to `high`. `why` is added to the error text."""

    def check(value):
        if value is not None and not low <= value <= high:  # also refuses NaN
            raise UserError(f"must be {low:g} to {high:g}" + (f"; {why}" if why else ""))

    return validated_field(check, default=default)


def one_of(default: Any, allowed: tuple, why: str = ""):
    """A field whose value is one of `allowed`."""

    def check(value):
        if not any(value is choice or (type(value) is type(choice) and value == choice) for choice in allowed):
            raise UserError(f"must be one of {allowed}" + (f"; {why}" if why else ""))

    return validated_field(check, default=default)


def checked(default_factory: Callable[[], Any], check: Callable[[Any], None]):
    """A field with its own check, which raises ValueError, and a default that is created for each instance."""
    return validated_field(check, default_factory=default_factory)


def _key(options: dict) -> str:
    """Options as text, independent of their order; 1, 1.0 and True give different texts."""
    return repr(sorted(options.items(), key=repr))


def norm_eps(default: float):
    """The epsilon of an RMSNorm."""
    return between(default, 1e-12, 0.1, "smaller ones vanish in float32, larger ones are no epsilon")


def conv_size(default: int = 4):
    """Taps of a short convolution."""
    return between(default, 2, 16, "the papers have 4")


@mixer_options
class MixerOptions:
    """Base of a mixer's options: plain JSON values. Subclasses are `@mixer_options` classes with more fields.

    Attributes:
        plain: the values by name, a list as {0: its first entry, ...}. A decode step reads this dictionary: a program
            of torch.compile checks objects and lists at each call, but dictionaries of numbers and texts, as a part of
            a module, only after something was assigned to them.
    """

    plain: ClassVar[dict]  # of each instance, and no option

    local_window: int = between(0, 0, LARGEST_WINDOW, "tokens of attention beside the memory; 0 is none")

    # options that change how a state is read, but not its meaning: a saved state stays valid when they change
    inference_options: ClassVar[tuple[str, ...]] = ()
    _checked: ClassVar[dict[str, "MixerOptions"]]  # valid options by the text of their values, per class

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        cls._checked = {}

    @classmethod
    def from_dict(cls, options: dict) -> "MixerOptions":
        """Options from a config's dict. Raises ValueError naming unknown keys and the known ones.

        The same values are checked once: a configuration, and each layer that is built from it, ask for them again.
        """
        if not isinstance(options, dict):
            raise UserError(f"options are {options!r}; give a dictionary of option names and values")
        key = _key(options)
        if key not in cls._checked:
            checked = cls._check(dict(options))
            # complete ones, as a configuration holds them, are the same
            cls._checked |= {key: checked, _key(checked.to_dict()): checked}
        return copy.deepcopy(cls._checked[key])

    @classmethod
    def check_each(cls, options: dict) -> None:
        """Check the names and the bounds of options one by one; `from_dict` also checks whether they fit together.

        Raises:
            UserError: an option is unknown, or its value is not of its type or outside its bounds.
        """
        cls._check_names(options)
        alone = cls()
        for name, value in options.items():
            setattr(alone, name, value)

    @classmethod
    def _check_names(cls, options: dict) -> None:
        known = [field.name for field in dataclasses.fields(cls)]
        if unknown := sorted(set(options) - set(known), key=str):
            raise UserError(f"unknown options {unknown}; known: {known}")

    @classmethod
    def _check(cls, options: dict) -> "MixerOptions":
        cls._check_names(options)
        return cls(**options)

    def to_dict(self) -> dict:
        """The values by name, lists as lists: what a config's `mixers[name]` holds, a copy."""
        return dataclasses.asdict(self)
