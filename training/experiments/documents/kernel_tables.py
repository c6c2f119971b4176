"""The tables of the kernels' speed, from the results of `kernels/benchmarks`."""

from functools import partial
from pathlib import Path

from hf_memmix.conversion.records import markdown_table
from hf_memmix.training.experiments.measurements import MEASUREMENTS, read

HEAD_DIM = 128  # of `kernel_table`
ATTENTION_SHAPED = ("sdpa", "short_conv", "gla", "gka")  # ops with other shapes are in `op_table`
# variant, pass, T and the target in milliseconds, at B=8, 12 heads of 64 channels and slots, in bf16
# the fields that every row of the kernels' JSON has; other fields describe variants of an op
ROW = ("op", "dtype", "pass", "ms", "kernel_ms", "peak_mib", "gpu", "torch", "triton", "commit", "note", *"BTHD")
HOST_BOUND = 0.9  # below this share of the time, the GPU's own time is shown, too

aligned_table = partial(markdown_table, figures=True)


def kernel_table(root: Path) -> str:
    """Milliseconds of the ops that share attention's shape, on the GPU, with torch's attention from the same run."""
    rows = [row for row in read("kernels", root) if row["op"] in ATTENTION_SHAPED and row["D"] == HEAD_DIM]
    ops: dict[str, dict] = {}
    for row in rows:
        schedule = row.get("iterations")
        note = (
            ""
            if schedule is None
            else f", {'+'.join(map(str, schedule if isinstance(schedule, list) else [schedule]))}"
        )
        ops.setdefault(f"`{row['op']}`{note}", {})[row["pass"], row["B"], row["T"]] = row["ms"]
    columns = {
        "fwd, 8k": ("fwd", 4, 8192),
        "fwd+bwd, 8k": ("fwd+bwd", 4, 8192),
        "fwd, 32k": ("fwd", 4, 32768),
        "fwd+bwd, 32k": ("fwd+bwd", 4, 32768),
        "decode, B=8": ("decode_graph", 8, 1),
    }
    lines = [[name, *(f"{ms[key]:.3g}" if key in ms else "" for key in columns.values())] for name, ms in ops.items()]
    (first, *others) = ({name: row[name] for name in ("gpu", "torch", "triton")} for row in rows)
    if any(other != first for other in others):
        raise ValueError(f"{MEASUREMENTS['kernels']} mixes machines or versions; run the benchmark again as a whole")
    commits = ", ".join(sorted({row["commit"] for row in rows}))
    return (
        aligned_table(["ms", *columns], lines)
        + "\n\nbf16; B=4, H=8, D=128; decode: one step of 32 heads inside a CUDA graph. The numbers after `gka` are "
        f"solver iterations, by refinement phase. {first['gpu']}, torch {first['torch']}, Triton {first['triton']}, "
        f"commit {commits}."
    )


def generate_table(root: Path) -> str:
    """Milliseconds per token of `generate()` with a static cache; of several runs the last one counts."""
    rows = read("generate", root)
    converted = {"gka": "the same with every layer `gka`"}
    last: dict[tuple, dict] = {}
    for row in rows:
        last[row["model"], row["context"], row["B"]] = row
    lines = []
    for model, context in dict.fromkeys(key[:2] for key in last):
        tokens = f"{context // 2**20} M" if context >= 2**20 else f"{context // 1024}k"
        pair = [last.get((model, context, batch)) for batch in (1, 32)]
        name = converted.get(model, f"{model.capitalize()}, 1.0 B shape")
        lines.append([name, tokens, *("" if row is None else f"{row['ms']:.2f}" for row in pair)])
    machines = {(row["gpu"], row["torch"]) for row in rows}
    if len(machines) != 1:
        raise ValueError(f"{MEASUREMENTS['generate']} mixes machines or versions; run the benchmark again as a whole")
    ((gpu, torch),) = machines
    commits = dict.fromkeys(row["commit"] for row in last.values())
    others = dict.fromkeys(row["commit"] for row in read("decode_turns", root) if "variant" not in row)
    note = f" [Limits](#limits) has decode with the kernels of other commits: {', '.join(others)}."
    note = "" if commits.keys() & others else note
    return (
        aligned_table(["ms per token", "context", "B=1", "B=32"], lines)
        + "\n\n`generate()` with the static cache, the step in one CUDA graph; random bf16 weights. "
        f"{gpu}, torch {torch}, commit{'s' * (len(commits) > 1)} {', '.join(commits)}.{note}"
    )


def op_table(root: Path, *ops: str) -> str:
    """Every measurement of the ops: one line per shape and variant, one column per pass, in milliseconds."""
    rows = [row for row in read("kernels", root) if row["op"] in ops]
    if not rows:
        raise ValueError(
            f"{MEASUREMENTS['kernels']} has no row of {', '.join(ops)}; run kernels/benchmarks/benchmark.py"
        )
    names = list(dict.fromkeys(name for row in rows for name in row if name not in ROW))
    passes = [name for name in ("fwd", "fwd+bwd", "decode_graph") if any(row["pass"] == name for row in rows)]
    lines: dict[tuple, dict] = {}
    for row in rows:
        key = (row["op"], *(str(row.get(name, "")) for name in names), *(row[name] for name in "BTHD"))
        cell = "refused" if row["ms"] is None else f"{row['ms']:.3g}"
        if row.get("kernel_ms") and row["kernel_ms"] < HOST_BOUND * row["ms"]:
            cell += f" (GPU {row['kernel_ms']:.3g})"
        lines.setdefault(key, {})[row["pass"]] = cell
    lines = {key: ms for key, ms in lines.items() if ms.keys() & set(passes)}
    table = [[f"`{op}`", *map(str, rest), *(ms.get(name, "") for name in passes)] for (op, *rest), ms in lines.items()]
    machine = {(row["gpu"], row["torch"], row["triton"]) for row in rows}
    if len(machine) != 1:
        raise ValueError(f"{MEASUREMENTS['kernels']} mixes machines or versions; run the benchmark again as a whole")
    ((gpu, torch, triton),) = machine
    commits = ", ".join(sorted({row["commit"] for row in rows}))
    return (
        aligned_table(["ms", *names, *"BTHD", *passes], table)
        + f"\n\n{rows[0]['dtype']}. {gpu}, torch {torch}, Triton {triton}, commit {commits}."
    )


def sketch_table(root: Path, trained: list[list[str]]) -> str:
    """Bytes and milliseconds of GKA by the size of its sketch; in brackets the share of the time without a sketch.

    Args:
        trained: for s = D, D/2 and D/4 what a training gave: the accuracy of recall and the perplexity.
    """
    rows = read("gka_sketch", root)
    columns = {"fwd": ("fwd", 4), "fwd+bwd": ("fwd+bwd", 4)}
    columns |= {f"decode, B={B}": ("decode_graph", B) for B in (1, 8, 64)}
    sizes: dict[int, dict] = {}
    for row in rows:
        sizes.setdefault(row["sketch"], {})[row["pass"], row["B"]] = row
    plain, lines = sizes[max(sizes)], []
    for (size, found), of_training in zip(sorted(sizes.items(), reverse=True), trained, strict=True):
        cells = [f"{found[key]['ms']:.3g} ({found[key]['ms'] / plain[key]['ms']:.2f})" for key in columns.values()]
        peak, some = found["fwd+bwd", 4]["peak_mib"], found["fwd", 4]
        name = "s = D" + (f"/{max(sizes) // size}" if size < max(sizes) else "")
        lines.append(
            [f"{size}: {name}", *of_training, f"{some['state_bytes_per_head'] / 1024:g}", *cells, f"{peak:.0f}"]
        )
    ((gpu, torch, triton, commit),) = {
        tuple(row[name] for name in ("gpu", "torch", "triton", "commit")) for row in rows
    }
    head = [
        "s",
        "MQAR, 32 pairs, %",
        "perplexity",
        "state per head, KiB",
        *(f"{name}, ms" for name in columns),
        "peak of fwd+bwd, MiB",
    ]
    return (
        aligned_table(head, lines)
        + "\n\nMQAR with heads of 32 channels and perplexity with heads of 64 after equal training, means over seeds"
        " (tables below). The rest: bf16, D=128, solver (12, 10); fwd and fwd+bwd: B=4, T=8192, H=8; decode: a step of"
        f" 32 heads inside a CUDA graph. s = 128 is without a sketch. {gpu}, torch {torch}, Triton {triton}, commit"
        f" {commit}."
    )
