"""Tables of what limits a decoded token and the ops on a GPU, from the results of `kernels/benchmarks`."""

from pathlib import Path

from hf_memmix.training.experiments.documents.kernel_tables import aligned_table
from hf_memmix.training.experiments.measurements import read

VARIANTS = {"products": "gates by products", "apart": "convolutions and norms apart", "masks": "with masks"}
SMALLEST_WAIT = 0.1  # share of a warp's time


def decode_profile_table(root: Path) -> str:
    """What the GPU and the checks of a compiled program take of one decoded token, by mixer."""
    rows = read("decode_profile", root)
    lines = []
    for row in rows:
        note = f", gates by {row['gates']}" if "gates" in row else ""
        parts = [f"{row[name]:.2f}" for name in ("kernel_ms", "gaps_ms", "guards_ms")]
        graph = f"{row['graph_ms']:.2f}" if "graph_ms" in row else ""
        lines.append([f"`{row['mixer']}`{note}", str(row["B"]), *parts, str(row["launches"]), graph])
    head = ["mixer", "B", "kernels", "gaps between them", "checks", "number of kernels", "one graph"]
    return aligned_table(head, lines) + f"\n\nMilliseconds. {_machine(rows)}."


def decode_turns_table(root: Path) -> str:
    """A decoded token on the clock, of models that took turns: median, each round, and times attention."""
    rows = read("decode_turns", root)
    attention = {(row["B"], row["commit"]): row["ms"] for row in rows if row["mixer"] == "attention"}
    lines = []
    for row in rows:
        note = f", {VARIANTS[row['variant']]}" if "variant" in row else ""
        first, *rounds = (f"{ms:.2f}" for ms in row["rounds"])
        of = attention.get((row["B"], row["commit"]))  # attention of the same run
        clock = [f"{row['ms']:.2f}", "" if of is None else f"{row['ms'] / of:.2f}"]
        graph = f"{row['graph_ms']:.2f}" if "graph_ms" in row else ""
        lines.append([f"`{row['mixer']}`{note}", str(row["B"]), *clock, graph, first, " ".join(rounds)])
    head = ["mixer", "B", "ms per token", "of attention", "one graph", "first round", "the other rounds"]
    return aligned_table(head, lines) + f"\n\n{_machine(rows)}."


def graph_time_table(root: Path) -> str:
    """One CUDA graph of a decode step by the state of its process and its host, measured in several ways."""
    rows = read("graph_time", root)
    ways = {"behind": "GPU alone", "back_to_back": "20 in a row", "idle": "GPU waits for the host", "host": "host"}
    ways |= {"first": "the first replay", "kernel_ms": "kernels", "clock_mhz": "MHz"}
    lines = []
    for row in rows:
        digits = [str(row[way]) if way == "clock_mhz" else f"{row[way]:.3f}" if way in row else "" for way in ways]
        apart = f"{100 * row['logits_from_apart']:.1f} %" if "logits_from_apart" in row else ""
        error = f"{100 * row['logits_error']:.2f} %" if "logits_error" in row else ""
        lines.append([row["graph"], row["state"], *digits, apart, error])
    head = ["convolutions and norms", "state", *ways.values(), "logits from apart", "from float32"]
    table = aligned_table(head, lines)
    return table + f"\n\nMilliseconds. {_machine(rows)}."


def _machine(rows: list[dict]) -> str:
    """The GPU and the versions of torch and Triton of all rows, and their commits."""
    ((gpu, torch, triton),) = {(row["gpu"], row["torch"], row["triton"]) for row in rows}
    commits = list(dict.fromkeys(row["commit"][:7] for row in rows))
    return f"{gpu}, torch {torch}, Triton {triton}, commit{'s' if len(commits) > 1 else ''} {', '.join(commits)}"


def host_time_table(root: Path) -> str:
    """A prompt and a training step of models in turns: with tapes and without, until the last kernel and until the
    call returns.
    """
    rows = read("host_time", root)
    kind = lambda row: (row["phase"], row["B"], row["T"], row["compiled"], row["mixer"], row.get("variant"))  # noqa: E731
    plain = {kind(row): row for row in rows if not row["tapes"]}
    taped = {kind(row): row for row in rows if row["tapes"]}
    lines = []
    for key in dict.fromkeys(map(kind, rows)):
        row, tape = plain.get(key), taped.get(key)
        times = [f"{x[name]:.2f}" if x else "" for x in (tape, row) for name in ("ms", "host_ms")]
        phase, batch, length, compiled, mixer, variant = key
        what = f"{phase}{', compiled' if compiled else ''}, {batch} x {length:,}"
        name = f"`{mixer}`{f', {VARIANTS[variant]}' if variant else ''}"
        same = {True: "yes", False: "no", None: ""}[(tape or {}).get("same")]
        lines.append([what, name, *times, same])
    head = ["phase", "mixer", "with tapes: ms", "host", "without: ms", "host", "same output"]
    return aligned_table(head, lines) + f"\n\n{_machine(rows)}."


def op_counters_table(root: Path) -> str:
    """What the warps of the ops' kernels wait for, and how busy the units of the GPU are."""
    found = read("op_counters", root)
    names = {"tensor": "tensor cores", "special": "special functions", "shared": "shared memory", "hbm": "HBM"}
    names = {name: title for name, title in names.items() if all(name in row for row in found["rows"])}
    lines = []
    for row in found["rows"]:
        issue = row["warp"].get("issue", 0)
        waits = ", ".join(
            f"{name} {100 * x:.0f} %" for name, x in row["warp"].items() if name != "issue" and x >= SMALLEST_WAIT
        )
        shape = " x ".join(str(row[name]) for name in "BTHD") + (f", rank {row['rank']}" if "rank" in row else "")
        units = [f"{100 * row[name]:.0f} %" for name in names]
        spills = f"{row.get('local_loads', 0) + row.get('local_stores', 0):.1f}"
        lines.append([shape, f"`{row['kernel']}`", f"{100 * issue:.0f} %", waits, *units, spills])
    commits = ", ".join(dict.fromkeys(row.get("commit", found["commit"])[:7] for row in found["rows"]))
    head = ["B x T x H x D", "kernel", "a warp issues", "it waits for", *names.values(), "spills, millions"]
    return (
        aligned_table(head, lines)
        + f"\n\nShares of a warp's time, waits from {100 * SMALLEST_WAIT:.0f} % on, and of the peak of a unit; loads "
        f"and stores of spilled registers by warps. {found['gpu']}, commit {commits}."
    )
