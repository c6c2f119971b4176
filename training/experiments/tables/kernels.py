"""The tables of kernels/README.md: which GPUs compile the kernels, and goals with what was measured."""

import itertools

from hf_memmix.conversion.records import markdown_table
from hf_memmix.training.experiments.results import read

MEASURED_ON = "sm_90"  # where the kernels also ran
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
# of whole models with two versions of Triton: title, phase and tapes of a row; attention has no tapes
TRITON_MODELS = [
    ("prompt of 2k", ("prompt", "launcher in C")),
    ("prompt of 2k, no tapes", ("prompt", "none")),
    ("prompt of 2k, CUDA graph", ("prompt as a graph", "none")),
    ("decode, B = 1", ("decode", "none")),
]
TRITON_MIXERS = ("gka", "lattice", "attention")
OP_KINDS = {"variant": "of kind", "decay_per": "per", "rank": "rank"}  # columns that tell rows of one op apart
SLOWER = 1.1  # from this ratio of an op's times with two versions on, one counts as slower
# predicted ms of GKA's prompt with Triton 3.9: at most the first; Triton's launch takes between the others more
PREDICTED = (12.5, 0.3, 0.6)
FLA = {"op": "ssd", "by": "fla chunk_simple_gla, refusal lifted"}  # the goal of gla
# phase, name, and goals as parts of attention's time: with native code, and without a compiler
CPU = [
    ("decode", "a token after 1k", 0.8, 1.3),
    ("prefill", "a prompt of 2k", 1.0, 1.3),
    ("train", "a training step of 2k", 1.0, 1.3),
]


def _version(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")))


def _compiles(row: dict) -> bool:
    """Whether all kernels of a row compile and fit the GPU's shared memory."""
    return not (row.get("crashed") or row.get("error") or row["failed"]) and row["shared"] <= row["limit"]


def _on_gpu(rows: list[dict], op: str, arch: str) -> str:
    """What an op does on a GPU, from its rows of all sizes, dtypes and versions of Triton."""
    ran = arch == MEASURED_ON
    verb = "runs" if ran else "compiles"
    if not rows:
        return "runs" if ran else "not tried"
    good = {name: all(_compiles(r) for r in rows if r["triton"] == name) for name in {r["triton"] for r in rows}}
    working = sorted((name for name, whole in good.items() if whole), key=_version)
    if not working:
        return "falls back"
    older = [name for name in good if _version(name) < _version(working[0])]
    return f"{verb} from Triton {'.'.join(working[0].split('.')[:2])} on, else falls back" if older else verb


def gpu_generations() -> str:
    """One line per group of ops and sizes that run alike on every GPU; one column per generation of GPUs."""
    rows, lines = read("gpu_generations"), {}
    archs = [arch for arch in EXAMPLES if any(row["arch"] == arch for row in rows)]
    for op in dict.fromkeys(row["op"] for row in rows):
        groups: dict[tuple, list[int]] = {}
        for size in sorted({row["size"] for row in rows if row["op"] == op}):
            found = [row for row in rows if (row["op"], row["size"]) == (op, size)]
            cells = tuple(_on_gpu([row for row in found if row["arch"] == arch], op, arch) for arch in archs)
            groups.setdefault(cells, []).append(size)
        for cells, sizes in groups.items():
            name = f"`{op}`" + (f" {' and '.join(map(str, sizes))}" if len(groups) > 1 else "")
            lines.setdefault(cells, []).append(name)
    lines = [[", ".join(names), *cells] for cells, names in lines.items()]
    limits = {row["arch"]: f"{row['limit'] // 1024} KiB" for row in rows}
    lines.append(["shared memory", *(limits[arch] for arch in archs)])
    found = {name: {(r["arch"], r["op"], r["size"]) for r in rows if r["dtype"] == name} for name in DTYPES}
    both, some = set.intersection(*found.values()), set.union(*found.values())
    versions = ", ".join(sorted({row["triton"] for row in rows}, key=_version))
    return (
        markdown_table(["op", *(f"{arch} ({EXAMPLES[arch]})" for arch in archs)], lines)
        + "\n\nForward, backward and decode steps, compiled in bfloat16 or float32, and in both for"
        f" {len(both)} of {len(some)} pairs of a size and a GPU, with Triton {versions}."
    )


def _shown(value: float, column: str) -> str:
    if column == "tokens_s":
        return f"{value / 1e3:.1f}k"
    return f"{value / 1024:.1f}" if column == "peak_mib" else f"{value:.2f}" if value < 20 else f"{value:.1f}"


def _case(row: dict) -> tuple:
    way = "graph" if row.get("cuda_graph") else "compiled" if row["compiled"] and row["phase"] != "decode" else None
    return (row["phase"], row["B"], row["T"], *([way] if way else []), row["mixer"])


def model_goals() -> str:
    """Goals of whole models on a GPU, beside attention of the same shape."""
    found, lines = {_case(row): row for row in read("model_h200")}, []
    for title, case, column, factor, own in MODELS:
        of = {name: row[column] for name in ("attention", *MIXERS) if (row := found.get((*case, name)))}
        sign, limit = (">=", -1) if column == "tokens_s" else ("<=", 1)  # more is better, or less

        def cell(value: float | None, goal: float, shown: float, column=column, limit=limit) -> str:
            if value is None:
                return ""
            return _shown(shown, column) + ("" if limit * value <= limit * goal else " missed")

        goal, gkas = of["attention"] * factor, own * of["attention"] if column != "ms" else own
        cells = [cell(of.get(mixer), goal, of.get(mixer)) for mixer in MIXERS]
        told = f"{sign} {factor:g} x {_shown(of['attention'], column)}"
        lines.append([title, told, *cells, f"{sign} {cell(of['gka'], gkas, gkas)}"])
    head = ["", "goal", *(f"`{mixer}`" for mixer in MIXERS), "goal of `gka`"]
    note = "ms, where the row names no other unit. `model_h200.json`."
    return f"{markdown_table(head, lines, figures=True)}\n\n{note}"


WINDOWS = {
    "attention": "attention",
    "window": "`window`, 512 tokens",
    "window/1": "with one sink",
    "gka": "`gka`",
    "gka+64/1": "`gka`, 64 and one sink beside it",
}
# of the op: tokens and head size, and what was predicted before the run
WINDOW_TIMES = {
    (512, 64): "0.30 to 0.45 / 1.4 to 2.0",
    (512, 128): "0.45 to 0.65 / 2.4 to 3.4",
    (384, 64): "0.78 to 0.85 of 512",
    (384, 128): "0.78 to 0.85 of 512",
}


def windows() -> str:
    """Whole models with windows beside attention and GKA: alone on a machine, and beside a training."""
    beside = " Prompts and decoding: beside a training on the machine's other GPU, so the processor was slower."
    return f"{_windows('model_windows_h100')}\n\n{_windows('model_windows_h200')}{beside}"


def _windows(file: str) -> str:
    rows = read(file)
    models = {name: text for name, text in WINDOWS.items() if name in {row["mixer"] for row in rows}}
    cases = list(dict.fromkeys(_case(row)[:-1] for row in rows))
    found, lines = {_case(row): row for row in rows}, []
    for case in cases:
        phase, batch, length, *way = case
        column = "tokens_s" if phase == "train" else "ms"
        title = f"{phase}, {batch} x {length}" + (", CUDA graph" if way else "") + (", tokens/s" * (column != "ms"))
        of = [found.get((*case, name)) for name in models]
        lines.append([title, *("" if row is None else _shown(row[column], column) for row in of)])
    (gpu,), commits = (list(dict.fromkeys(row[name] for row in rows)) for name in ("gpu", "commit"))
    note = "ms, where the row names no other unit; decode: sequences x prompt."
    note += f" {gpu}, commit {', '.join(commits)}, one run{'' if len(commits) == 1 else ' each'}."
    note += " Empty: not measured." * any("" in line for line in lines)
    return f"{markdown_table(['', *models.values()], lines, figures=True)}\n\n{note}"


def window_times() -> str:
    """The op of windows on one GPU, beside attention: what was predicted before the run, and what it measured."""
    rows, lines, passes = read("window_h100"), [], ("fwd", "fwd+bwd")
    rows = [row for row in rows if (row["B"], row["T"], row["H"]) == (4, 8192, 16)]
    found = {(row.get("window"), row.get("sinks"), row["D"], row["pass"]): row["ms"] for row in rows}
    for (size, dim), predicted in WINDOW_TIMES.items():
        plain, sink, attention = (
            [found[*of, dim, way] for way in passes] for of in ((size, 0), (size, 1), (None, None))
        )
        parts = [a / b for a, b in zip(sink, plain, strict=True)]
        lines.append([size, dim, predicted, *map(_slashed, (plain, sink, parts, attention))])
    (gpu,), (commit,) = ({row[name] for row in rows} for name in ("gpu", "commit"))
    head = ["tokens", "D", "predicted", "ms", "one sink", "of that without", "attention"]
    return (
        f"{markdown_table(head, lines, figures=True)}\n\nForward / forward and backward, 4 x 8192 x 16 heads,"
        f" bfloat16. {gpu}, commit {commit}, one run. `window_h100.json`."
    )


def op_goals() -> str:
    """Goals of the ops' kernels in milliseconds of a call, and which are met; gla beside FLA's op."""
    rows, lines, met = read("h200"), [], []

    def of(columns: dict, shape: tuple, ways: list[str]) -> list[float | None]:
        wanted = columns | dict(zip("BTHD", shape, strict=True))
        found = {row["pass"]: row for row in rows if all(row.get(key) == value for key, value in wanted.items())}
        return [found[way].get("ms") if way in found else None for way in ways]

    size, passes = (8, 4096, 12, 64), ["fwd", "fwd+bwd"]
    fla = dict(zip(passes, of(FLA, size, passes), strict=True))
    for name, columns, shape, goals in [*OPS, ("gla; goal: FLA's", FLA | {"by": "gla"}, size, fla)]:
        measured = of(columns, shape, list(goals))
        met += [
            f"{name.partition(';')[0]} ({way})"
            for way, ms, goal in zip(goals, measured, goals.values(), strict=True)
            if None not in (ms, goal) and ms <= goal
        ]
        lines.append([name, " x ".join(map(str, shape)), *map(_slashed, (goals.values(), measured))])
    head = ["op", "B x T x H x D", "goal", "ms"]
    note = "Forward / forward and backward, or a decode step. All goals are missed"
    note += (f", but for {', '.join(met)}" if met else "") + ". `h200.json`."
    return f"{markdown_table(head, lines, figures=True)}\n\n{note}"


def triton_versions() -> str:
    """Whole models and ops on one GPU with two versions of Triton; of the ops, which of them are as fast with both."""
    found, lines = read("triton_versions_h100"), []
    versions = sorted({row["triton"] for row in found["models"]}, key=_version)
    names = ["Triton " + ".".join(version.split(".")[:2]) for version in versions]

    def times(mixer: str, version: str, case: tuple) -> list[float]:
        rows = [row for row in found["models"] if (row["mixer"], row["triton"]) == (mixer, version)]
        return [row["ms"] for row in rows if (row["phase"], row.get("tape", "none")) == case]

    for title, case in TRITON_MODELS:
        cells = [times(mixer, version, case) for mixer in TRITON_MIXERS for version in versions]
        lines.append([title, *(", ".join(_shown(ms, "ms") for ms in cell) for cell in cells)])
    head = ["", *(f"`{mixer}`, {name[len('Triton ') :]}" for mixer in TRITON_MIXERS for name in names)]
    ops: dict[str, dict] = {}
    for row in found["ops"]:
        kind = [f"{title} {row[key]}" for key, title in OP_KINDS.items() if key in row]
        if row["pass"] in ("fwd", "fwd+bwd"):
            ops.setdefault(f"{' '.join([row['op'], *kind])} ({row['D']})", {})[row["pass"], row["triton"]] = row["ms"]
    slower = []
    for name, ms in ops.items():
        parts = [ms[way, versions[1]] / ms[way, versions[0]] for way in ("fwd", "fwd+bwd")]
        if max(parts) > SLOWER:
            slower.append(f"{name} " + " / ".join(f"{part:.2f}" for part in parts))
    best, least, most = PREDICTED
    launcher, tritons = (times("gka", versions[1], ("prompt", tape)) for tape in ("launcher in C", "Triton's call"))
    kept = max(launcher) <= best, all(least <= b - a <= most for a, b in zip(launcher, tritons, strict=True))
    fast, near = ("met" if x else "missed" for x in kept)
    return (
        f"{markdown_table(head, lines, figures=True)}\n\n"
        "The models above with two versions of Triton, on a host where Python is slow: ms, two series where two"
        f" numbers stand. Predicted of `gka` with 3.9: at most {best} in the first row ({fast}), and {least} to {most}"
        f" more where tapes call Triton's launch ({near}). Of an op's time with {names[0]}, {names[1]} takes, forward"
        f" / forward and backward, by op (head size): {'; '.join(slower)}; all others at most {SLOWER}."
        f" {found['gpu']}, commit {found['commit']}. `triton_versions_h100.json`."
    )


def _slashed(values) -> str:
    return " / ".join("" if x is None else f"{x:.3g}" for x in values) if any(x is not None for x in values) else ""


def cpu_goals() -> str:
    """Goals on a CPU, as parts of attention's time, with one and with two threads, with native code and without."""
    found = {tuple(row[name] for name in ("native", "shape", "threads", "mixer", "phase")): row for row in read("cpu")}
    threads, lines = sorted({key[2] for key in found}), []
    mixers = [name for name in dict.fromkeys(key[3] for key in found) if name != "attention"]
    ways = list(dict.fromkeys(key[:2] for key in sorted(found, key=lambda key: not key[0])))
    for (native, shape), (phase, name, *goals) in itertools.product(ways, CPU):
        goal, cells = goals[not native], []
        for mixer in mixers:
            pairs = [[found.get((native, shape, n, of, phase)) for of in (mixer, "attention")] for n in threads]
            parts = [of["cpu_ms"] / attention["cpu_ms"] for of, attention in pairs if of and attention]
            cells.append("/".join(f"**{part:.2f}**" if round(part, 2) > goal else f"{part:.2f}" for part in parts))
        if any(cells):
            title = f"{name}, {shape} model" + ", no compiler" * (not native)
            lines.append([title, f"<= {goal:g}", *cells])
    head = ["of attention's time", "goal", *(f"`{mixer}`" for mixer in mixers)]
    note = f"With {'/'.join(map(str, threads))} threads; processor time. Bold: goal missed. Empty: not measured."
    return f"{markdown_table(head, lines, figures=True)}\n\n{note}"
