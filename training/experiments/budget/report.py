"""The tables of the levers: the time of a step with every lever, and the kernels that take it."""

from hf_memmix.conversion.records import markdown_table
from hf_memmix.training.experiments.common.harness import measured_at

# what a kernel is for, by a part of its name; the first that matches
KERNELS = {
    "gka": ("gka_",),
    "matrix products": ("nvjet", "cutlass", "cublasLt"),
    "rest": ("",),
}
OFF_BY = {"graph off by": "graph_against_eager", "repeated step off by": "eager_against_eager"}


def levers(results: dict) -> str:
    """Milliseconds and tokens per second of every row that trains, the parts of a profiled step, how many seconds the
    first steps take longer, and how far the gradients of a recorded step are from those of a plain one. What no row
    has is no column.
    """
    rows = [row for row in results["rows"] if "tokens_s" in row]
    parts = [_parts(row["profile"]) if row.get("profile") else {} for row in rows]
    columns = {
        "row": [row["row"].replace(" :", ":") for row in rows],
        "ms": [f"{row['ms']:.0f}" for row in rows],
        "tokens/s": [f"{row['tokens_s']:,}" for row in rows],
        **{f"{name}, ms": [f"{part[name]:.0f}" if part else "" for part in parts] for name in KERNELS},
        "start, s": [f"{row['start_s']:.0f}" if "start_s" in row else "" for row in rows],
        **{
            title: [f"{row[key]:.1e}".replace("0.0e+00", "0") if key in row else "" for row in rows]
            for title, key in OFF_BY.items()
        },
    }
    columns = {title: cells for title, cells in columns.items() if any(cells)}
    table = markdown_table(list(columns), [list(cells) for cells in zip(*columns.values(), strict=True)], figures=True)
    notes = [f"{measured_at(results)}."]
    if OFF_BY.keys() & columns.keys():
        notes.append(
            "Off by: the largest relative difference of a parameter's gradient from that of a step without graph; of a"
            " repeated step without graph."
        )
    if "start, s" in columns:
        notes.append("Start: how much longer the first steps take, with nothing compiled before.")
    return f"{table}\n\n{' '.join(notes)}"


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
