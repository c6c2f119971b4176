"""Versions of Triton side by side on one GPU, for kernels/README.md."""

from pathlib import Path

from hf_memmix.conversion.records import markdown_table
from hf_memmix.training.documents.gpu_tables import version
from hf_memmix.training.documents.measurements import read

PASSES = {"forward": "forward", "forward_backward": "forward and backward", "decode": "decode"}


def _by_version(root: Path, measured: str) -> tuple[list[str], dict[tuple, dict[str, dict]]]:
    """The versions, and the rows of every op, dtype and pass by version."""
    rows = [row for row in read("triton_versions", root) if row["measured"] == measured]
    found: dict[tuple, dict[str, dict]] = {}
    for row in rows:
        found.setdefault((row["op"], row["dtype"], row.get("pass")), {})[row["triton"]] = row
    return sorted({row["triton"] for row in rows}, key=version), found


def triton_versions_table(root: Path) -> str:
    """Times of every op, and its largest errors, with each version."""
    versions, times = _by_version(root, "times")
    _, errors = _by_version(root, "errors")
    old, new = versions[0], versions[-1]
    rows = []
    for (op, dtype, name), found in times.items():
        ms = [found[v]["ms"] if v in found else None for v in versions]
        ratio = f"{ms[-1] / ms[0]:.2f}" if None not in (ms[0], ms[-1]) else ""
        rows.append([f"`{op}`", dtype, PASSES.get(name, name), *("" if t is None else f"{t:.3f}" for t in ms), ratio])
    head = ["op", "dtype", "pass", *(f"ms, Triton {v}" for v in versions), f"{new} / {old}"]
    text = markdown_table(head, rows)
    lines = [
        [f"`{op}`", dtype, *(f"{found[v]['part']:.3f}" if v in found else "" for v in versions)]
        for (op, dtype, _), found in errors.items()
    ]
    text += "\n\n" + markdown_table(["op", "dtype", *(f"error, Triton {v}" for v in versions)], lines)
    some = next(iter(times.values()))[new]
    return text + (
        "\n\nError: the largest of outputs, states and gradients against float64, as a part of what the tests allow"
        f" (1 is the limit). {some['gpu']}, torch {some['torch']}."
    )


def triton_traps_table(root: Path) -> str:
    """What the kernels do beside what they avoid, with each version."""
    versions, found = _by_version(root, "traps")
    rows = []
    for (op, dtype, way), row in found.items():
        cells = []
        for v in versions:
            if v not in row:
                cells += ["", ""]
                continue
            part = row[v]["part"]
            cells += ["not finite" if part is None else f"{part:,.2f}", f"{row[v]['ms']:.3f}"]
        rows.append([op, dtype, way, *cells])
    head = ["trap", "dtype", "way", *(f"{what}, Triton {v}" for v in versions for what in ("error", "ms"))]
    return markdown_table(head, rows)
