"""The table of GPU generations in kernels/README.md, from what `kernels/benchmarks/gpu_generations.py` compiled."""

from pathlib import Path

from hf_memmix.conversion.records import markdown_table
from hf_memmix.training.experiments.measurements import read

MEASURED_ON = "sm_90"  # where the kernels also ran, see the other tables
DTYPES = ("bfloat16", "float32")
EXAMPLES = {
    "sm_80": "A100",
    "sm_86": "RTX 3090, A10",
    "sm_89": "RTX 4090, L4",
    "sm_90": "H100, H200",
    "sm_100": "B200",
    "sm_120": "RTX 5090",
    "gfx942": "MI300X",
}


def compiles(row: dict) -> bool:
    """Whether all kernels of a row compile and fit the GPU's shared memory."""
    return not (row.get("crashed") or row.get("error") or row["failed"]) and row["shared"] <= row["limit"]


def version(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")))


def _cell(rows: list[dict], arch: str) -> str:
    """What an op does on a GPU, from its rows of all sizes, dtypes and versions of Triton."""
    if not rows:
        return "runs" if arch == MEASURED_ON else "not tried"
    good = {name: all(compiles(r) for r in rows if r["triton"] == name) for name in {r["triton"] for r in rows}}
    working = sorted((name for name, whole in good.items() if whole), key=version)
    if not working:
        return "falls back"
    verb = "runs" if arch == MEASURED_ON else "compiles"
    older = [name for name in good if version(name) < version(working[0])]
    return f"{verb} from Triton {'.'.join(working[0].split('.')[:2])} on, else falls back" if older else verb


def _lines(op: str, rows: list[dict], archs: list[str]) -> list[list[str]]:
    """The lines of an op: one, or one per group of sizes that differ on some GPU."""
    groups: dict[tuple, list[int]] = {}
    for size in sorted({row["size"] for row in rows if row["op"] == op}):
        found = [row for row in rows if (row["op"], row["size"]) == (op, size)]
        cells = tuple(_cell([row for row in found if row["arch"] == arch], arch) for arch in archs)
        groups.setdefault(cells, []).append(size)
    if len(groups) == 1:
        return [[f"`{op}`", *cells] for cells in groups]
    return [[f"`{op}`, size {', '.join(map(str, sizes))}", *cells] for cells, sizes in groups.items()]


def gpu_table(root: Path) -> str:
    """One line per op, one column per generation of GPUs."""
    rows = read("gpu_generations", root)
    archs = [arch for arch in EXAMPLES if any(row["arch"] == arch for row in rows)]
    lines = [line for op in dict.fromkeys(row["op"] for row in rows) for line in _lines(op, rows, archs)]
    limits = {row["arch"]: f"{row['limit'] // 1024} KiB" for row in rows}
    heads = [f"{arch} ({EXAMPLES[arch]})" for arch in archs]
    found = {name: {(r["arch"], r["op"], r["size"]) for r in rows if r["dtype"] == name} for name in DTYPES}
    both, some = set.intersection(*found.values()), set.union(*found.values())
    versions = ", ".join(sorted({row["triton"] for row in rows}, key=version))
    return (
        markdown_table(["op", *heads], [*lines, ["shared memory", *(limits[arch] for arch in archs)]])
        + "\n\nForward, backward and decode steps, compiled in bfloat16 or float32, and in both for"
        f" {len(both)} of {len(some)} pairs of a size and a GPU, with Triton {versions}."
    )
