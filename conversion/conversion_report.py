"""The report of a conversion: whether each tensor was used, transformed, dropped or copied, or is fresh."""

import re
from collections import Counter
from dataclasses import asdict, dataclass, field


@dataclass
class ConversionReport:
    """What a conversion did with every tensor.

    `mixer`: the mixer of the memory layers, None if there are several. `layers`: the mixer of every layer, or
    "attention".
    `tensors`: rows `{"layer", "source", "fate", "targets", "reason"}` for the attention tensors of memory layers.
    `fresh`: parameters of mixers that were not filled from the teacher.
    `copied`: names of tensors outside the converted attention, which are bit-equal.
    """

    mixer: str | None
    converted: list[int]
    kept: list[int]
    layers: list[str]
    tensors: list[dict] = field(default_factory=list)
    fresh: list[str] = field(default_factory=list)
    copied: list[str] = field(default_factory=list)

    def counts(self) -> dict[str, int]:
        """Number of tensors used, transformed, dropped, fresh and copied."""
        fates = Counter(row["fate"] for row in self.tensors)
        counts = {fate: fates[fate] for fate in ("used", "transformed", "dropped")}
        return counts | {"fresh": len(self.fresh), "copied": len(self.copied)}

    def kinds(self) -> list[dict]:
        """The tensors of all memory layers, one row for those that differ in the layer only: `{"source", "fate",
        "targets", "reason", "layers"}`. "{i}" stands for the layer. Fresh parameters have an empty source.
        """
        rows: dict[tuple, list[int]] = {}
        for row in self.tensors:
            own = (_of_any_layer(row["source"], row["layer"]), row["fate"], tuple(row["targets"]), row["reason"])
            rows.setdefault(own, []).append(row["layer"])
        for name in self.fresh:
            layer = next(i for i in self.converted if _of_any_layer(name, i) != name)
            target = _of_any_layer(name, layer)
            rows.setdefault(("", "fresh", (target,), "initialised by the mixer itself"), []).append(layer)
        names = ("source", "fate", "targets", "reason", "layers")
        return [dict(zip(names, (*own, layers), strict=True)) for own, layers in rows.items()]

    def record(self) -> dict:
        """All fields and the counts, as JSON values."""
        return asdict(self) | {"counts": self.counts()}


def _of_any_layer(names: str, layer: int) -> str:
    return re.sub(rf"\.{layer}\.", ".{i}.", names)
