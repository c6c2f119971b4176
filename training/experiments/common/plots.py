"""The one kind of picture that the experiments draw: panels with a line per model."""

from dataclasses import dataclass, field
from pathlib import Path

from hf_memmix.training.evaluation.picture import new_picture, write_picture

MARKERS = "osD^vP*Xh<>dpH8"
COLOURS = 10  # that matplotlib has; further lines are dashed


@dataclass(frozen=True)
class Panel:
    """The points (x, y) of each line by its label, and further properties of the axes: title, xlabel, xscale, ..."""

    lines: dict[str, list[tuple[float, float]]]
    axes: dict = field(default_factory=dict)


def draw(panels: list[Panel], path: str | Path, caption: str, columns: int | None = None) -> None:
    """Draw the panels into a PNG, in rows of `columns` (default: one row). A label has one style in all panels."""
    columns = columns or len(panels)
    rows = -(-len(panels) // columns)
    figure, axes = new_picture(rows, columns, figsize=(3.6 * columns + 1.5, 3.4 * rows), squeeze=False)
    places = {label: place for place, label in enumerate(dict.fromkeys(x for panel in panels for x in panel.lines))}
    shown = {}
    for panel, axis in zip(panels, axes.flat, strict=False):
        for label, points in panel.lines.items():
            place = places[label]
            style = {"marker": MARKERS[place % len(MARKERS)], "color": f"C{place % COLOURS}", "ms": 4}
            style["linestyle"] = "-" if place < COLOURS else "--"
            (shown[label],) = axis.plot([x for x, _ in points], [y for _, y in points], **style)
        axis.grid(alpha=0.3)
        axis.set(**panel.axes)
        axis.minorticks_off()
    figure.legend(shown.values(), shown.keys(), loc="outside right upper", fontsize=8, frameon=False)
    figure.supxlabel(caption, fontsize=8, color="#555555")
    write_picture(figure, path, dpi=110)
