"""The table of measure_levers.py: the time of a step with every lever, and the kernels that take it."""

from hf_memmix.conversion.records import markdown_table
from hf_memmix.training.experiments.common.harness import measured_at

# what a kernel is for, by a part of its name; the first that matches
KERNELS = {
    "gka": ("gka_",),
    "matrix products": ("nvjet", "cutlass", "cublasLt"),
    "rest": ("",),
}


def levers(results: dict) -> str:
    """Milliseconds and tokens per second of every row that trains, the parts of a profiled step, and how far the
    gradients of a recorded step are from those of a plain one.
    """
    lines = []
    for row in results["rows"]:
        if "tokens_s" not in row:
            continue
        parts = _parts(row["profile"]) if row.get("profile") else {}
        cells = [f"{row['ms']:.0f}", f"{row['tokens_s']:,}", *(f"{parts[k]:.0f}" if parts else "" for k in KERNELS)]
        off = [
            f"{row[key]:.1e}".replace("0.0e+00", "0") if key in row else ""
            for key in ("graph_against_eager", "eager_against_eager")
        ]
        lines.append([row["row"].replace(" :", ":"), *cells, *off])
    head = ["row", "ms", "tokens/s", *(f"{name}, ms" for name in KERNELS), "graph off by", "repeated step off by"]
    return (
        f"{markdown_table(head, lines, figures=True)}\n\n{measured_at(results)}. Off by: the largest relative"
        " difference of a parameter's gradient from that of a step without graph; of a repeated step without graph."
    )


def _parts(profile: dict) -> dict[str, float]:
    """Milliseconds by `KERNELS`; kernels too short to be listed are "rest"."""
    found = dict.fromkeys(KERNELS, 0.0)
    for name, _, ms in profile["top"]:
        found[next(part for part, names in KERNELS.items() if any(word in name for word in names))] += ms
    found["rest"] += profile["kernel_ms"] - sum(found.values())
    return found


def last_digit(results: dict) -> str:
    """The largest relative difference of a gradient after one element of one layer's gradient was changed."""
    lines = [
        [row["layer"], f"{row['off_by']:.1e}" if row["off_by"] else "0", row["parameter"]] for row in results["rows"]
    ]
    head = ["changed layer", "largest difference", "of"]
    where = f"The shape of 135M with 8 kept layers, {results['tokens']} tokens; {measured_at(results)}."
    return f"{markdown_table(head, lines)}\n\n{where}"
