"""Versions of Triton side by side on one GPU, for kernels/README.md."""

from pathlib import Path

from hf_memmix.conversion.records import markdown_table
from hf_memmix.training.experiments.documents.gpu_tables import version
from hf_memmix.training.experiments.measurements import read

# passes of which the GPU's own time is known
PASSES = {"fwd": "forward", "fwd+bwd": "forward and backward", "decode_graph": "decode step of 8 sequences"}


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
    for (op, _, name), found in times.items():
        if name in PASSES:
            ms = [found[v]["kernel_ms"] or found[v]["ms"] for v in versions]
            cells = [f"{t:.4f}" if name == "decode_graph" else f"{t:.3f}" for t in ms]
            rows.append([f"`{op}`", PASSES[name], *cells, f"{ms[-1] / ms[0]:.2f}"])
    head = ["op", "pass", *(f"ms, Triton {v}" for v in versions), f"{new} / {old}"]
    text = markdown_table(head, rows, figures=True)
    lines = [
        [f"`{op}`", dtype, *(f"{found[v]['part']:.3f}" if v in found else "" for v in versions)]
        for (op, dtype, _), found in errors.items()
    ]
    text += "\n\n" + markdown_table(["op", "dtype", *(f"error, Triton {v}" for v in versions)], lines, figures=True)
    some = next(iter(times.values()))[new]
    return text + (
        "\n\nThe time of the kernels alone, in bf16. Error: the largest of outputs, states and gradients against"
        " float64, as a part of what the tests allow"
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
    return markdown_table(head, rows, figures=True)
