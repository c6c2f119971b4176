"""The tables of the levers: the time of a step with every lever, and the kernels that take it."""

from hf_memmix.conversion.records import markdown_table
from hf_memmix.training.experiments.common.harness import measured_at

# what a kernel is for, by a part of its name; the first that matches
KERNELS = {
    "gka": ("gka_",),
    "matrix products": ("nvjet", "cutlass", "cublasLt"),
    "rest": ("",),
}
SHOWN = ("gka", "matrix products")
GRAPH_OFF = "graph_against_eager"
OFF_BY = {"graph off by": GRAPH_OFF, "repeated step off by": "eager_against_eager"}


def levers(results: dict) -> str:
    """Milliseconds and tokens per second of every row that trains, the parts of profiled steps, and how far the
    gradients of a recorded step are from those of a plain one if this is measured for all rows and not always 0.
    Runs through the Trainer have a table of their own: `_through_trainer`.
    """
    rows = [row for row in results["rows"] if "tokens_s" in row and "through the Trainer" not in row["row"]]
    if all("start_s" in row for row in rows):
        return f"{_through_trainer(rows)} {measured_at(results)}."
    parts = [_parts(row["profile"]) if row.get("profile") else {} for row in rows]
    columns = {
        "row": [row["row"].replace(" :", ":") for row in rows],
        "ms": [f"{row['ms']:.0f}" for row in rows],
        "tokens/s": [f"{row['tokens_s']:,}" for row in rows],
    }
    if any(parts):
        columns |= {f"{name}, ms": [f"{part[name]:.0f}" if part else "" for part in parts] for name in SHOWN}
    differs = all(key in row for row in rows for key in OFF_BY.values()) and any(row[GRAPH_OFF] for row in rows)
    if differs:
        for title, key in OFF_BY.items():
            columns[title] = [f"{row[key]:.1e}".replace("0.0e+00", "0") for row in rows]
    table = markdown_table(list(columns), [list(cells) for cells in zip(*columns.values(), strict=True)], figures=True)
    note = " Off by: the largest relative difference of a parameter's gradient from that of a step without graph."
    return f"{table}\n\n{measured_at(results)}.{note * differs}"


def _through_trainer(rows: list[dict]) -> str:
    """One line per model and stage, without and with `compile: true`."""
    cells: dict[str, list[str]] = {}
    for row in rows:
        name, _, _ = row["row"].partition(": Trainer")
        cells.setdefault(name, [name]).extend([f"{row['tokens_s']:,}", f"{row['start_s']:.0f}"])
    head = ["Trainer, with a graph", "tokens/s", "start, s", "compiled: tokens/s", "start, s"]
    return (
        f"{markdown_table(head, cells.values(), figures=True)}\n\nStart: how much longer the first steps take, with"
        " nothing compiled before."
    )


def _parts(profile: dict) -> dict[str, float]:
    """Milliseconds by `KERNELS`; kernels too short to be listed are "rest"."""
    found = dict.fromkeys(KERNELS, 0.0)
    for name, _, ms in profile["top"]:
        found[next(part for part, names in KERNELS.items() if any(word in name for word in names))] += ms
    found["rest"] += profile["kernel_ms"] - sum(found.values())
    return found
