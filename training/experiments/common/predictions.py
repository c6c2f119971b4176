"""The table of what became of an experiment's predictions, computed from its results."""

from dataclasses import dataclass, field

from hf_memmix.conversion.records import markdown_table

Found = tuple[str, bool]  # what was measured, and whether it is as predicted


@dataclass(frozen=True)
class Outcome:
    """What became of a prediction.

    found: the parts that were measured.
    final: whether further rows cannot change them; otherwise the prediction is open.
    """

    prediction: str
    found: list[Found] = field(default_factory=list)
    final: bool = True

    @property
    def verdict(self) -> str:
        if not (self.found and self.final):
            return "open"
        right = sum(as_predicted for _, as_predicted in self.found)
        return "right" if right == len(self.found) else f"{right} of {len(self.found)} right" if right else "missed"

    @property
    def measured(self) -> str:
        return "; ".join(f"{said}{'' if as_predicted else ' (missed)'}" for said, as_predicted in self.found)


def predictions_table(title: str, outcomes: dict[str, Outcome]) -> str:
    """One line per prediction, by its number. title: of the column with the predictions."""
    lines = [[number, one.prediction, one.measured, one.verdict] for number, one in outcomes.items()]
    return markdown_table(["", title, "measured", ""], lines)
