"""Tables of the goals for whole models and ops: each goal, what was measured, and whether it is met."""

from pathlib import Path

from hf_memmix.training.experiments.documents.kernel_tables import aligned_table
from hf_memmix.training.experiments.measurements import MEASUREMENTS, read

MIXERS = ("gka", "lattice", "mamba2", "ska", "coffee")
SCHEDULE = [12, 10]  # of the layer's solver
# title; phase, B, T and way of the rows; measured column; the goal of every mixer as a part of attention's; GKA's own
# goal in ms or, for other columns, as a part of attention's
MODELS = [
    ("decode, B = 1", ("decode", 1, 1024), "ms", 1.0, 2.37),
    ("decode, B = 32", ("decode", 32, 1024), "ms", 1.0, 3.0),
    ("decode, B = 128", ("decode", 128, 1024), "ms", 1.0, 4.5),
    ("prefill of 2k", ("prefill", 1, 2048), "ms", 1.1, 13.0),
    ("prefill of 2k, CUDA graph", ("prefill", 1, 2048, "graph"), "ms", 1.1, 13.0),
    ("prefill of 2k, compiled", ("prefill", 1, 2048, "compiled"), "ms", 1.1, 13.0),
    ("prefill of 32k", ("prefill", 1, 32768), "ms", 0.8, 180.0),
    ("training of 8 x 2k, tokens/s", ("train", 8, 2048), "tokens_s", 0.9, 1.0),
    ("the same, compiled", ("train", 8, 2048, "compiled"), "tokens_s", 0.9, 1.0),
    ("training of 2 x 8k, tokens/s", ("train", 2, 8192), "tokens_s", 1.0, 1.25),
    ("training of 8 x 2k, GiB", ("train", 8, 2048), "peak_mib", 1.2, 1.1),
]
# op and columns of its rows; passes and their goals in ms
OPS = [
    ("GKA", {"op": "gka", "iterations": SCHEDULE}, (4, 8192, 8, 128), {"fwd": 1.05, "fwd+bwd": 3.1}),
    ("GKA", {"op": "gka", "iterations": SCHEDULE}, (1, 131072, 8, 128), {"fwd": 5, "fwd+bwd": 19}),
    ("GKA", {"op": "gka", "iterations": SCHEDULE}, (4, 8192, 4, 256), {"fwd": 4, "fwd+bwd": 14}),
    ("GKA, decode", {"op": "gka", "iterations": SCHEDULE}, (8, 1, 32, 128), {"decode_graph": 0.022}),
    ("GKA, decode", {"op": "gka", "iterations": SCHEDULE}, (64, 1, 32, 128), {"decode_graph": 0.15}),
    ("GKA, decode", {"op": "gka", "iterations": SCHEDULE}, (64, 1, 16, 256), {"decode_graph": 0.4}),
    ("Lattice `dec`", {"op": "lattice", "variant": "dec"}, (8, 4096, 12, 64), {"fwd": 0.9, "fwd+bwd": 3.5}),
    ("Lattice `enc`", {"op": "lattice", "variant": "enc"}, (8, 4096, 12, 64), {"fwd": 0.38, "fwd+bwd": 1.4}),
    ("Lattice `sim`", {"op": "lattice", "variant": "sim"}, (8, 4096, 12, 64), {"fwd": 0.38, "fwd+bwd": 1.4}),
    ("Lattice `dec`", {"op": "lattice", "variant": "dec"}, (1, 131072, 12, 64), {"fwd": 25, "fwd+bwd": 80}),
    ("COFFEE", {"op": "coffee"}, (8, 4096, 1536, 16), {"fwd": 0.31, "fwd+bwd": 1.0}),
    ("SKA, rank 32", {"op": "ska", "rank": 32}, (8, 4096, 12, 64), {"fwd": 0.25, "fwd+bwd": 1.0}),
    ("SKA, rank 64", {"op": "ska", "rank": 64}, (8, 4096, 12, 64), {"fwd": 0.7, "fwd+bwd": 3}),
]
# phase, name and goal as a part of attention's time
CPU = [
    ("decode", "a token after 1k", 1.0),
    ("prefill", "a prompt of 2k", 1.5),
    ("train", "a training step of 2k", 1.5),
]


def model_goals_table(root: Path) -> str:
    """Goals of whole models on a GPU, beside attention of the same shape."""
    found = {_case(row): row for row in read("models", root)}
    lines = []
    for title, case, column, factor, own in MODELS:
        more = column == "tokens_s"  # more is better
        attention = found[*case, "attention"][column]
        goal = attention * factor
        cells = []
        for mixer in MIXERS:
            row = found.get((*case, mixer))
            kept = row and (row[column] >= goal if more else row[column] <= goal)
            cells.append("" if row is None else _shown(row[column], column) + ("" if kept else " missed"))
        gka, limit = found[*case, "gka"][column], own * attention if column != "ms" else own
        kept = gka >= limit if more else gka <= limit
        sign = ">=" if more else "<="
        goals = [f"{sign} {factor:g} x {_shown(attention, column)}", f"{sign} {_shown(limit, column)}"]
        lines.append([title, goals[0], *cells, goals[1] + ("" if kept else " missed")])
    head = ["", "goal", *(f"`{mixer}`" for mixer in MIXERS), "goal of `gka`"]
    note = f"ms, where the row names no other unit. {_file('models')}"
    return f"{aligned_table(head, lines)}\n\n{note}"


def _case(row: dict) -> tuple:
    way = "graph" if row.get("cuda_graph") else "compiled" if row["compiled"] and row["phase"] != "decode" else None
    return (row["phase"], row["B"], row["T"], *([way] if way else []), row["mixer"])


def _shown(value: float, column: str) -> str:
    if column == "tokens_s":
        return f"{value / 1e3:.1f}k"
    return f"{value / 1024:.1f}" if column == "peak_mib" else f"{value:.2f}" if value < 20 else f"{value:.1f}"


def op_goals_table(root: Path) -> str:
    """Goals of the ops' kernels: milliseconds of a call, and of its kernels alone."""
    rows, lines = read("kernels", root), []
    for name, columns, shape, goals in OPS:
        sizes = dict(zip("BTHD", shape, strict=True))
        found = {
            row["pass"]: row
            for row in rows
            if all(row.get(key) == value for key, value in (columns | sizes).items()) and row["pass"] in goals
        }
        measured = [found[way]["ms"] if way in found else None for way in goals]
        gpu = [found[way].get("kernel_ms") if way in found else None for way in goals]
        kept = [ms is not None and ms <= goal for ms, goal in zip(measured, goals.values(), strict=True)]
        lines.append([name, " x ".join(map(str, shape)), _slashed(goals.values()), _slashed(measured), _slashed(gpu)])
        lines[-1].append("yes" if all(kept) else " / ".join("yes" if x else "no" for x in kept))
    lines.append(_gla_line(rows))
    head = ["op", "B x T x H x D", "goal", "ms", "GPU alone", "met"]
    return aligned_table(head, lines) + f"\n\nForward / forward and backward, or a decode step. {_file('kernels')}"


def _gla_line(rows: list[dict]) -> list[str]:
    """gla beside FLA's op, whose backward pass runs with its refusal lifted."""
    shape = {"op": "ssd", "B": 8, "T": 4096, "H": 12, "D": 64}

    def of(by: str, column: str) -> list[float | None]:
        found = {row["pass"]: row for row in rows if all(row.get(k) == v for k, v in (shape | {"by": by}).items())}
        return [found[way].get(column) if way in found else None for way in ("fwd", "fwd+bwd")]

    fla, ours, gpu = (
        of("fla chunk_simple_gla, refusal lifted", "ms"),
        of("gla", "ms"),
        of("gla", "kernel_ms"),
    )
    kept = [
        "yes" if ms is not None and goal is not None and ms <= goal else "no"
        for ms, goal in zip(ours, fla, strict=True)
    ]
    met = "yes" if set(kept) == {"yes"} else " / ".join(kept)
    return ["gla; goal: FLA's", "8 x 4096 x 12 x 64", _slashed(fla), _slashed(ours), _slashed(gpu), met]


def _slashed(values) -> str:
    return " / ".join("" if x is None else f"{x:.3g}" for x in values) if any(x is not None for x in values) else ""


def cpu_goals_table(root: Path) -> str:
    """Goals on a CPU, as parts of attention's time; and the errors of GKA's gradients."""
    rows = [row for row in read("cpu", root) if row["native"]]
    found = {(row["shape"], row["threads"], row["mixer"], row["phase"]): row["cpu_ms"] for row in rows}
    lines = []
    for shape, threads in dict.fromkeys(key[:2] for key in found):
        for phase, name, goal in CPU:
            of = found[shape, threads, "attention", phase]
            parts = [found[shape, threads, mixer, phase] / of for mixer in MIXERS]
            cells = [f"{part:.2f}" + ("" if round(part, 2) <= goal else " missed") for part in parts]
            lines.append([f"{name}, {shape} model, {threads} thread{'s' * (threads > 1)}", f"<= {goal:g}", *cells])
    table = aligned_table(["of attention's time", "goal", *(f"`{mixer}`" for mixer in MIXERS)], lines)
    return table + f"\n\nNative code, processor time. {_file('cpu')}"


def _file(name: str) -> str:
    return f"`{Path(MEASUREMENTS[name]).name}`."
