"""The tables of the kernels' speed, from the results of `kernels/benchmarks`."""

from functools import partial
from pathlib import Path

from hf_memmix.conversion.records import markdown_table
from hf_memmix.training.experiments.measurements import MEASUREMENTS, read
from hf_memmix_kernels.coffee.sizes import coffee_method

HEAD_DIM = 128  # of `kernel_table`
ATTENTION_SHAPED = ("sdpa", "short_conv", "gla", "gka")  # ops with other shapes are in `op_table`
# variant, pass, T and the target in milliseconds, at B=8, 12 heads of 64 channels and slots, in bf16
LATTICE_TARGETS = (
    ("dec", "fwd", 4096, 1.2),
    ("dec", "fwd+bwd", 4096, 5),
    ("enc", "fwd", 4096, 0.4),
    ("enc", "fwd+bwd", 4096, 1.5),
    ("sim", "fwd", 4096, 0.4),
    ("sim", "fwd+bwd", 4096, 1.5),
    ("dec", "decode_graph", 1, 0.02),
)
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


def coffee_grid_table(root: Path) -> str:
    """Milliseconds of COFFEE's methods, a line per width and method, a column per length; bold: "auto" picks it."""
    grid = read("coffee_grid", root)
    tokens = list(dict.fromkeys(row["T"] for row in grid["rows"]))
    converged = {(row["D"], row["B"], row["method"]) for row in grid["rows"] if row["ms"] is not None}
    lines: dict[tuple, list[str]] = {}
    for B, T, D, n, method, ms, note in (row.values() for row in grid["rows"]):
        if (D, B, method) in converged:
            cell = "" if note is None or "converge" not in note else "n. c."
            cell = cell if ms is None else f"{ms:.3g}"
            bold = "**" if cell and coffee_method(B, T, D, n) == method else ""
            lines.setdefault((f"{B} x {D} x {n} = {B * D * n:,}", method), []).append(bold + cell + bold)
    return (
        aligned_table(
            ["B x D x n", "ms", *(f"T = {T:,}" for T in tokens)], [[*key, *line] for key, line in lines.items()]
        )
        + f"\n\n{grid['dtype']}, forward. **Bold**: what `auto` runs. n. c.: the iterations did not converge on this"
        " draw and the scan ran as well; a method that never converged has no line. Empty: above 100 ms or 100 GB. "
        f"{grid['gpu']}, torch {grid['torch']}, Triton {grid['triton']}, commit {grid['commit']}."
    )


def coffee_draws_table(root: Path) -> str:
    """On how many random draws multiple shooting converges."""
    found = read("coffee_draws", root)
    lines = [
        [
            f"{row['T']:,}",
            f"{row['D'] * row['n']:,}",
            f"{row['scale']:g}",
            f"{row['converged']} of {row['draws']}",
            "" if row["iterations"] is None else f"{row['iterations']:g}",
            f"{row['given_up']}",
        ]
        for row in found["rows"]
    ]
    return aligned_table(["T", "lanes", "scale", "converged", "iterations, median", "given up early"], lines)


def lattice_profile_table(root: Path) -> str:
    """Milliseconds of every Lattice kernel at the last commit measured, and what a token takes where it walks."""
    rows = read("lattice_profile", root)
    rows = [row for row in rows if row["commit"] == rows[-1]["commit"]]
    issued = {
        (row["variant"], row["kernel"]): row["instructions_per_token"]
        for row in read("lattice_issue", root)["rows"]
        if "instructions_per_token" in row
    }
    passes = ("fwd", "fwd+bwd")
    lines: dict[tuple, dict] = {}
    for row in rows:
        for kernel, ms in row["ms"].items():
            walks = row["ns_per_token"].get(kernel)
            cell = f"{ms:.3g}" + ("" if walks is None else f" ({walks:.0f} ns)")
            lines.setdefault((row["variant"], kernel), {})[row["pass"]] = cell
    table = [
        [variant, f"`{kernel}`", *(cells.get(name, "") for name in passes), f"{issued.get((variant, kernel), '')}"]
        for (variant, kernel), cells in lines.items()
    ]
    return (
        aligned_table(["variant", "kernel", *(f"ms of {name}" for name in passes), "instructions"], table)
        + "\n\nAll launches of a kernel together; in brackets the time of a token, and last the instructions that a "
        f"warp issues for it. {rows[-1]['gpu']}, commit {rows[-1]['commit']}."
    )


def lattice_targets_table(root: Path) -> str:
    """The targets of Lattice's kernels, and the measured milliseconds."""
    rows = [row for row in read("kernels", root) if row["op"] == "lattice"]
    lines = []
    for variant, name, tokens, target in LATTICE_TARGETS:
        ms = next(
            row["ms"]
            for row in rows
            if (row["variant"], row["pass"], row["B"], row["T"]) == (variant, name, 8, tokens)
        )
        lines.append(
            [variant, name, f"{target:g}", f"{ms:.3g}", "met" if ms <= target else f"{ms / target:.2g} times"]
        )
    return aligned_table(["variant", "pass", "target, ms", "measured, ms", ""], lines)


def lattice_counters_table(root: Path) -> str:
    """The shares of time in which the warps of each Lattice kernel issue instructions or wait, with the reason."""
    found = read("lattice_counters", root)
    lines = []
    for row in found["rows"]:
        shares = {name: f"{100 * x:.0f} %" for name, x in row["warp"].items() if x >= 0.05}
        issue = shares.pop("issue", "")
        waits = ", ".join(f"{name} {share}" for name, share in shares.items())
        if "levels" not in row["kernel"]:
            lines.append([row["variant"], f"`{row['kernel']}`", issue, waits, f"{100 * row['hbm']:.0f} %"])
    return (
        aligned_table(["variant", "kernel", "a warp issues", "it waits for", "of HBM's peak"], lines)
        + f"\n\nShares of a warp's time, from 5 % on. {found['gpu']}, commit {found['commit']}."
    )


def models_table(root: Path) -> str:
    """Whole models beside the transformer of the same shape: milliseconds, tokens/s and memory."""

    def case(row: dict) -> tuple[str, int, int]:
        way = ", CUDA graph" if row.get("cuda_graph") else ""
        way = ", compiled" if row["compiled"] and row["phase"] != "decode" else way
        return row["phase"] + way, row["B"], row["T"]

    results = read("models", root)
    order = list(dict.fromkeys(map(case, results)))
    attention = {case(row): row for row in results if row["mixer"] == "attention"}
    rows = [
        [
            case(row)[0],
            f"{row['B']} x {row['T']:,}",
            f"`{row['mixer']}`",
            f"{row['ms']:.2f}" if row["phase"] == "decode" else f"{row['ms']:.1f}",
            f"{row['kernel_ms']:.1f}" if "kernel_ms" in row else "",
            f"{row['tokens_s']:,}",
            f"{row['tokens_s'] / attention[case(row)]['tokens_s']:.2f}" if case(row) in attention else "",
            f"{row['peak_mib'] / 1024:.1f}",
            row["commit"][:7],
        ]
        for row in sorted(results, key=lambda row: order.index(case(row)))
    ]
    head = ["phase", "B x T", "mixer", "ms", "GPU ms", "tokens/s", "of attention", "GiB", "commit"]
    ((gpu, torch, triton),) = {(row["gpu"], row["torch"], row["triton"]) for row in results}
    return aligned_table(head, rows) + f"\n\nbf16. {gpu}, torch {torch}, Triton {triton}."


def cpu_table(root: Path) -> str:
    """Whole models on a CPU beside the transformer of the same shape: processor time, torch operators per token."""
    results = read("cpu", root)
    phases = {"decode": "decode, ms per token", "prefill": "prefill of 2k, s", "train": "training step of 2k, s"}
    measured = {(row["shape"], row["threads"], row["native"], row["mixer"], row["phase"]): row for row in results}
    lines = []
    for shape, threads, native, mixer in dict.fromkeys(key[:4] for key in measured):
        line = [f"{shape}, {threads}", f"`{mixer}`", "yes" if native else "no"]
        decode = measured.get((shape, threads, native, mixer, "decode"))
        line.append("" if decode is None else str(decode["operators"]))
        for phase in phases:
            row = measured.get((shape, threads, native, mixer, phase))
            of = measured.get((shape, threads, native, "attention", phase))
            value = "" if row is None else f"{row['cpu_ms'] / (1 if phase == 'decode' else 1e3):.2f}"
            line += [value, "" if row is None or of is None else f"{row['cpu_ms'] / of['cpu_ms']:.2f}"]
        lines.append(line)
    columns = [name for phase in phases.values() for name in (phase, "of attention")]
    head = ["shape, threads", "mixer", "native code", "operators per token", *columns]
    machine = ("processor", "cores", "torch", "transformers")
    found = {tuple(row[name] for name in machine) for row in results}
    if len(found) != 1:
        raise ValueError(f"{MEASUREMENTS['cpu']} mixes machines or versions; run the benchmark again as a whole")
    ((processor, cores, torch, transformers),) = found
    commits = ", ".join(dict.fromkeys(row["commit"] for row in results))
    return aligned_table(head, lines) + (
        f"\n\nfp32, one sequence, every layer converted; medians of the time that the process used on all cores. "
        f"{processor}, {cores} cores, torch {torch}, transformers {transformers}, commit {commits}."
    )
