"""A choice of layers as users write it: indices such as "0-3,8", a number of layers "2", or a share of them "0.25".

Commands, recipes, plans and `convert_model` use this module. A range is compared with the number of layers before a
list is built, so that "0-999999999999" is refused at once.
"""

import itertools
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from hf_memmix.errors import UserError

_PART = re.compile(r"\s*(\d{1,18})\s*(?:-\s*(\d{1,18})\s*)?")


@dataclass(frozen=True)
class LayerChoice:
    """Layers by index (`ranges`), or a number of layers (`count`: an integer, or a share of all layers in (0, 1)).

    `written`: the beginning of error messages, with the option and the value that the user wrote.
    """

    written: str
    ranges: tuple[range, ...] = ()
    count: int | float | None = None

    @classmethod
    def listed(cls, text: str, name: str = "layers") -> "LayerChoice":
        """Layers by index: indices and ranges, e.g. "0-3,8", or "none". `name`: name of the option in error messages.

        Raises:
            ValueError: the text has another form, or a range ends before it begins.
        """
        written = f"{name} is {text!r}"
        if text.strip() == "none":
            return cls(written)
        ranges = []
        for part in text.split(","):
            match = _PART.fullmatch(part)
            first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
            if last < first:
                raise UserError(f'{written}; give layer indices and ranges with commas between, e.g. "0-3,8"')
            ranges.append(range(first, last + 1))
        return cls(written, tuple(ranges))

    @classmethod
    def counted(cls, text: str, name: str = "count") -> "LayerChoice":
        """A number of layers, "2", or a share of all layers, "0.25".

        Raises:
            ValueError: the text is neither an integer of at least 1 nor a fraction between 0 and 1.
        """
        written = f"{name} is {text!r}"
        try:
            count = float(text) if "." in text else int(text)
        except ValueError:
            count = 0
        if not (0 < count < 1 if isinstance(count, float) else count >= 1):
            raise UserError(f'{written}; give a number of layers "2" or a fraction between 0 and 1, e.g. "0.25"')
        return cls(written, count=count)

    @classmethod
    def of(cls, keep, name: str = "keep") -> "LayerChoice":
        """The choice for a Python value: layer indices, a share in (0, 1), or a text as in `listed`.

        Raises:
            ValueError: the value is none of these.
        """
        if isinstance(keep, LayerChoice):
            return keep
        if isinstance(keep, str):
            return cls.listed(keep, name)
        written = f"{name} is {list(keep)!r}" if isinstance(keep, Sequence) else f"{name} is {keep!r}"
        if isinstance(keep, float) and 0 < keep < 1:
            return cls(written, count=keep)
        # an iterator has its layers only once, and a conversion may ask more than once
        if not isinstance(keep, Collection) or not all(type(i) is int for i in keep):
            raise UserError(
                f"{written}; give a list of layer indices, a fraction between 0 and 1, a text such as"
                ' "0-3,8", or "none"'
            )
        return cls(written, tuple(range(i, i + 1) for i in keep))

    def layers(self, num_layers: int) -> list[int]:
        """Indices of the chosen layers, in order, in a model of `num_layers` layers. A count is spread evenly.

        Raises:
            ValueError: a named layer does not exist or is named twice, or the count is larger than `num_layers`.
        """
        if self.count is not None:
            count = self.number(num_layers)
            return [int((i + 0.5) * num_layers / count) for i in range(count)]
        beyond = [part for part in self.ranges if part.start < 0 or part.stop > num_layers]
        if beyond:
            raise UserError(
                f"{self.written}; it names layers {_named(beyond)}, but there are layers 0 to {num_layers - 1}"
            )
        chosen = sorted(layer for part in self.ranges for layer in part)
        if repeated := [layer for layer, next_one in itertools.pairwise(chosen) if layer == next_one]:
            raise UserError(f"{self.written}; it names layer {repeated[0]} twice; name each layer once")
        return chosen

    def number(self, num_layers: int) -> int:
        """How many of `num_layers` layers are chosen. A share gives at least one layer.

        Raises:
            ValueError: as in `layers`.
        """
        if self.count is None:
            return len(self.layers(num_layers))
        count = max(1, round(self.count * num_layers)) if isinstance(self.count, float) else self.count
        if count > num_layers:
            raise UserError(f"{self.written}, but there are {num_layers} layers; give a smaller number")
        return count


def layers_to_keep(keep, num_layers: int) -> list[int]:
    """Layer indices that stay attention.

    Args:
        keep: a `LayerChoice`, indices, a share in (0, 1) spread evenly, a text such as "0-3,8", or "none".

    Raises:
        ValueError: `keep` has another form, names a layer that does not exist, or keeps all layers.
    """
    choice = LayerChoice.of(keep)
    layers = choice.layers(num_layers)
    if len(layers) == num_layers:
        raise UserError(
            f"{choice.written}; that keeps all {num_layers} layers, so nothing is left to convert; keep fewer"
        )
    return layers


def layers_without_rope(choice, kept: Sequence[int], num_layers: int, name: str = "keep_without_rope") -> list[int]:
    """Layer indices whose attention stays without rotary embeddings.

    Args:
        choice: "all" kept layers, or as in `LayerChoice.of`.
        kept: the layers that stay attention.
        name: name of the argument or option in error messages.

    Raises:
        ValueError: the choice has another form, or names a layer that does not stay attention.
    """
    if isinstance(choice, str) and choice.strip() == "all":
        if not kept:
            raise UserError(f"{name} is 'all', but no layer keeps its attention; keep some, or leave it out")
        return list(kept)
    layers = LayerChoice.of(choice, name).layers(num_layers)
    if wrong := [layer for layer in layers if layer not in kept]:
        raise UserError(
            f"{name} is {choice!r}, but layers {wrong} do not keep their attention; kept here: {list(kept)}"
        )
    return layers


def layer_text(layers: Sequence[int]) -> str:
    """Layer indices, in order, as a text that `LayerChoice.listed` reads: "0-3,8"; "none" for no layer."""
    ranges: list[range] = []
    for layer in layers:
        if ranges and ranges[-1].stop == layer:
            ranges[-1] = range(ranges[-1].start, layer + 1)
        else:
            ranges.append(range(layer, layer + 1))
    return _named(ranges).replace(" ", "") or "none"


def _named(ranges: list[range]) -> str:
    return ", ".join(str(part.start) if len(part) == 1 else f"{part.start}-{part.stop - 1}" for part in ranges)
