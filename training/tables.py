"""The tables of README.md and of other documents, from committed measurements; `readme_tables` puts them in place."""

import json
from pathlib import Path

DEMO = "training/results/demo.json"
CARDS = "model_cards"
KERNELS = "kernels/benchmarks/results/h200.json"
ATTENTION_SHAPED = ("sdpa", "short_conv", "gla", "gka")  # the others have shapes of their own: `op_table`
GENERATE = "kernels/benchmarks/results/generate_h200.json"
COFFEE_GRID = "kernels/benchmarks/results/coffee_dispatch_h200.json"
COFFEE_DRAWS = "kernels/benchmarks/results/coffee_convergence.json"
LATTICE_PROFILE = "kernels/benchmarks/results/lattice_profile_h200.json"
LATTICE_COUNTERS = "kernels/benchmarks/results/lattice_counters_h200.json"
LATTICE_ISSUE = "kernels/benchmarks/results/lattice_issue_sm90.json"
LATTICE_FROZEN = "kernels/benchmarks/results/lattice_frozen_cpu.json"
# variant, pass, T and milliseconds that were asked for at B=8, 12 heads of 64 channels and slots, in bf16
LATTICE_TARGETS = (
    ("dec", "fwd", 4096, 1.2),
    ("dec", "fwd+bwd", 4096, 5),
    ("enc", "fwd", 4096, 0.4),
    ("enc", "fwd+bwd", 4096, 1.5),
    ("sim", "fwd", 4096, 0.4),
    ("sim", "fwd+bwd", 4096, 1.5),
    ("dec", "decode_graph", 1, 0.02),
)
# what every row of the kernels' JSON has; further fields tell variants of an op apart
ROW = ("op", "B", "T", "H", "D", "dtype", "pass", "ms", "peak_mib", "gpu", "torch", "triton", "commit", "note")


def markdown(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table; the first column is text, the others are figures."""
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def size(count: int) -> str:
    """Bytes in the binary unit that keeps the number short."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def demo_table(root: Path) -> str:
    """Both models of `make demo`, side by side."""
    results = json.loads((root / DEMO).read_text())
    quality = results["quality"]
    pairs = list(zip(results["context_cost"]["teacher"], results["context_cost"]["student"], strict=True))
    layers = f"{results['student']['converted_layers']} of {results['student']['layers']} layers"
    rows = [
        ["held-out perplexity", f"{quality['teacher_ppl']:.2f}", f"{quality['student_ppl']:.2f}"],
        ["same most likely token", "", f"{100 * quality['top1_agreement']:.1f} %"],
    ]
    for theirs, ours in pairs:
        if theirs["context"] >= 4096:
            name = f"cache at {theirs['context'] // 1024}k tokens of context"
            rows.append([name, size(theirs["cache_bytes"]), size(ours["cache_bytes"])])
    for theirs, ours in pairs:
        name = f"decode after {theirs['context'] // 1024}k tokens, tokens/s"
        rows.append([name, *(f"{1e3 / row['ms_per_token']:.0f}" for row in (theirs, ours))])
    minutes = results["seconds"]["total"] / 60
    return (
        markdown(["", "transformer", f"GKA, {layers}"], rows)
        + f"\n\n{results['hardware']}; torch {results['torch']}, transformers {results['transformers']}; "
        f"{minutes:.1f} minutes in all, of which {results['seconds']['align'] + results['seconds']['distill']:.0f} s "
        f"are training. Perplexity over {quality['tokens']:,} tokens of the held-out text; the demo's learning "
        "rates and steps were chosen on another text."
    )


def student_table(root: Path) -> str:
    """Every student whose measurements are among the model cards."""
    lines, devices, tokens = [], set(), set()
    for path in sorted((root / CARDS).glob("*/metrics*.json")):
        metrics = json.loads(path.read_text())
        heldout = metrics["heldout"]
        if "student_ppl" not in heldout:
            continue
        kept = metrics["keep"] if isinstance(metrics["keep"], list) else []
        name = f"`assets/{path.parent.name}`"
        if path.stem != "metrics":
            name = f"{path.parent.name}, {path.stem.removeprefix('metrics_')} (not bundled)"
        line = [name, ", ".join(metrics["mixer_options"]), str(len(kept)), str(len(heldout["layer_error"]))]
        line += [f"{heldout[key]:.2f}" for key in ("teacher_ppl", "student_ppl")]
        lines.append([*line, f"{heldout['ppl_ratio']:.3f}", f"{100 * heldout['top1_agreement']:.1f} %"])
        tokens.add(f"{heldout['tokens']:,}")
        devices.add(f"{metrics['device']} in {metrics['seconds'] / 60:.0f} minutes")
    head = [
        "student",
        "mixer",
        "attention layers",
        "mixer layers",
        "teacher ppl",
        "student ppl",
        "ratio",
        "same token",
    ]
    return markdown(head, lines) + (
        f"\n\n{', '.join(sorted(tokens))} tokens of the held-out text, on which no choice rests; "
        f"distilled on one {', '.join(sorted(devices))} each."
    )


def kernel_table(root: Path) -> str:
    """Milliseconds of the ops that share attention's shape, on the GPU, with torch's attention from the same run."""
    rows = [row for row in json.loads((root / KERNELS).read_text()) if row["op"] in ATTENTION_SHAPED]
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
        raise ValueError(f"{KERNELS} mixes machines or versions; run the benchmark again as a whole")
    commits = ", ".join(sorted({row["commit"] for row in rows}))
    return (
        markdown(["ms", *columns], lines)
        + "\n\nbf16; B=4, H=8, D=128; decode: one step of 32 heads inside a CUDA graph. The numbers after `gka` are "
        f"solver iterations, by refinement phase. {first['gpu']}, torch {first['torch']}, Triton {first['triton']}, "
        f"commit {commits}."
    )


def generate_table(root: Path) -> str:
    """Milliseconds per token of `generate()` with a static cache; of several runs the last one counts."""
    rows = json.loads((root / GENERATE).read_text())
    names = {"llama": "Llama, 1.1 B shape", "gka": "the same with every layer `gka`"}
    last: dict[tuple, dict] = {}
    for row in rows:
        last[row["model"], row["context"], row["B"]] = row
    lines = []
    for model, context in dict.fromkeys(key[:2] for key in last):
        tokens = f"{context // 2**20} M" if context >= 2**20 else f"{context // 1024}k"
        pair = [last.get((model, context, batch)) for batch in (1, 32)]
        lines.append([names[model], tokens, *("" if row is None else f"{row['ms']:.2f}" for row in pair)])
    machines = {(row["gpu"], row["torch"]) for row in rows}
    if len(machines) != 1:
        raise ValueError(f"{GENERATE} mixes machines or versions; run the benchmark again as a whole")
    ((gpu, torch),) = machines
    commits = ", ".join(dict.fromkeys(row["commit"] for row in last.values()))
    return (
        markdown(["ms per token", "context", "B=1", "B=32"], lines)
        + "\n\n`generate()` with the static cache, the step in one CUDA graph; random bf16 weights. "
        f"{gpu}, torch {torch}, commits {commits}."
    )


def op_table(root: Path, *ops: str) -> str:
    """Every measurement of the ops: a line a shape and variant, a column a pass, in milliseconds."""
    rows = [row for row in json.loads((root / KERNELS).read_text()) if row["op"] in ops]
    if not rows:
        raise ValueError(f"{KERNELS} has no row of {', '.join(ops)}; run kernels/benchmarks/benchmark.py")
    names = list(dict.fromkeys(name for row in rows for name in row if name not in ROW))
    passes = [name for name in ("fwd", "fwd+bwd", "decode_graph") if any(row["pass"] == name for row in rows)]
    lines: dict[tuple, dict] = {}
    for row in rows:
        key = (row["op"], *(str(row.get(name, "")) for name in names), *(row[name] for name in "BTHD"))
        lines.setdefault(key, {})[row["pass"]] = "refused" if row["ms"] is None else f"{row['ms']:.3g}"
    lines = {key: ms for key, ms in lines.items() if ms.keys() & set(passes)}
    table = [[f"`{op}`", *map(str, rest), *(ms.get(name, "") for name in passes)] for (op, *rest), ms in lines.items()]
    machine = {(row["gpu"], row["torch"], row["triton"]) for row in rows}
    if len(machine) != 1:
        raise ValueError(f"{KERNELS} mixes machines or versions; run the benchmark again as a whole")
    ((gpu, torch, triton),) = machine
    commits = ", ".join(sorted({row["commit"] for row in rows}))
    return (
        markdown(["ms", *names, *"BTHD", *passes], table)
        + f"\n\n{rows[0]['dtype']}. {gpu}, torch {torch}, Triton {triton}, commit {commits}."
    )


def coffee_grid_table(root: Path) -> str:
    """Milliseconds of COFFEE's methods, a line a width and method, a column a length; bold is what "auto" picks."""
    # here: the rule is the op's own, and imports torch
    from hf_memmix_kernels.coffee.sizes import coffee_method

    grid = json.loads((root / COFFEE_GRID).read_text())
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
        markdown(["B x D x n", "ms", *(f"T = {T:,}" for T in tokens)], [[*key, *line] for key, line in lines.items()])
        + f"\n\n{grid['dtype']}, forward. **Bold**: what `auto` runs. n. c.: the iterations did not converge on this"
        " draw and the scan ran as well; a method that never converged has no line. Empty: above 100 ms or 100 GB. "
        f"{grid['gpu']}, torch {grid['torch']}, Triton {grid['triton']}, commit {grid['commit']}."
    )


def coffee_draws_table(root: Path) -> str:
    """On how many random draws multiple shooting converges."""
    found = json.loads((root / COFFEE_DRAWS).read_text())
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
    return markdown(["T", "lanes", "scale", "converged", "iterations, median", "given up early"], lines)


def lattice_profile_table(root: Path) -> str:
    """Milliseconds of every Lattice kernel at the last commit measured, and what a token takes where it walks."""
    rows = json.loads((root / LATTICE_PROFILE).read_text())
    rows = [row for row in rows if row["commit"] == rows[-1]["commit"]]
    issued = {
        (row["variant"], row["kernel"]): row["instructions_per_token"]
        for row in json.loads((root / LATTICE_ISSUE).read_text())["rows"]
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
        markdown(["variant", "kernel", *(f"ms of {name}" for name in passes), "instructions"], table)
        + "\n\nAll launches of a kernel together; in brackets the time of a token, and last the instructions that a "
        f"warp issues for it. {rows[-1]['gpu']}, commit {rows[-1]['commit']}."
    )


def lattice_targets_table(root: Path) -> str:
    """What was asked of Lattice's kernels, and the milliseconds measured."""
    rows = [row for row in json.loads((root / KERNELS).read_text()) if row["op"] == "lattice"]
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
    return markdown(["variant", "pass", "target, ms", "measured, ms", ""], lines)


def lattice_counters_table(root: Path) -> str:
    """What the warps of every Lattice kernel wait for."""
    found = json.loads((root / LATTICE_COUNTERS).read_text())
    lines = []
    for row in found["rows"]:
        shares = {name: f"{100 * x:.0f} %" for name, x in row["warp"].items() if x >= 0.05}
        issue = shares.pop("issue", "")
        waits = ", ".join(f"{name} {share}" for name, share in shares.items())
        if "levels" not in row["kernel"]:
            lines.append([row["variant"], f"`{row['kernel']}`", issue, waits, f"{100 * row['hbm']:.0f} %"])
    return (
        markdown(["variant", "kernel", "a warp issues", "it waits for", "of HBM's peak"], lines)
        + f"\n\nShares of a warp's time, from 5 % on. {found['gpu']}, commit {found['commit']}."
    )


def lattice_frozen_table(root: Path) -> str:
    """Error of Lattice's frozen-state mode, by step and chunk size."""
    rows = json.loads((root / LATTICE_FROZEN).read_text())["rows"]
    head = ["variant", "gamma", *(f"C = {chunk}" for chunk in rows[0]["error"])]
    lines = [[row["variant"], f"{row['gamma']}", *(f"{100 * x:.2g} %" for x in row["error"].values())] for row in rows]
    return markdown(head, lines)


def experiment_tables(root: Path, *names: str) -> str:
    """What the experiments' own reports say of `training/results/NAME.json`."""
    # here: the reports import the experiments and with them torch
    from hf_memmix.training.experiments import (
        coffee_report,
        conversion_report,
        echo_report,
        init_report,
        lattice_report,
    )

    results = [json.loads((root / "training/results" / f"{name}.json").read_text()) for name in names]
    kinds = {found.get("experiment", "coffee") for found in results}
    if kinds == {"coffee"}:  # its tables are spread over files
        return coffee_report.report(results).rstrip()
    sections = []
    for found in results:
        kind = found["experiment"]
        if kind in echo_report.REPORTS:
            sections.append(echo_report.report(found).rstrip())
        else:
            report = {"conversion_table": conversion_report, "init_table": init_report}.get(kind, lattice_report)
            sections.append(report.section(found))
    return "\n\n".join(sections)


def gpus_table(root: Path) -> str:
    """Speed, memory and loss of every launch of `training/multi_gpu.py`."""
    results = json.loads((root / "training/results/multi_gpu.json").read_text())
    sizes = {"bundled": "bundled, 5M", "1b": "Llama shape, 1.3B"}
    launches = {
        "single": "1 GPU",
        "single_accumulated": "1 GPU, halves",
        "ddp": "2 GPUs, DDP",
        "fsdp2": "2 GPUs, FSDP2",
    }
    lines = []
    for model, size_name in sizes.items():
        for launch, title in launches.items():
            found = results["launches"].get(f"{model}_{launch}")
            for stage, row in (found or {"stages": {}})["stages"].items():
                compared = results["summary"].get(f"{model}_{launch}_{stage}", {})
                share, off = compared.get("scaling_efficiency"), compared.get("loss_difference")
                figures = (f"{row['tokens_per_second']:,}", size(row["peak_memory_bytes"]))
                figures += (
                    "" if share is None else f"{100 * share:.0f} %",
                    "" if off is None else f"{100 * off:.4f} %",
                )
                lines.append([size_name, stage, title, f"{row['tokens_per_step']:,}", *figures])
    head = ["model", "stage", "launch", "tokens a step", "tokens/s", "peak memory a GPU", "efficiency", "loss off by"]
    return (
        markdown(head, lines) + f"\n\n{results['gpus']} x {results['hardware']}, torch {results['torch']}, commit "
        f"{results['commit']}. Off by: the largest relative difference from the loss on one GPU, of all steps. "
        "Halves: gradient accumulation, in which the last rows of an epoch, fewer than a batch, weighed more."
    )


def plans_table(root: Path) -> str:
    """Students by which layers kept their attention: chosen by `memmix select`, uniform, the mean of all sets."""
    from hf_memmix.training.experiments.compare_plans import summary  # here: they import torch
    from hf_memmix.training.experiments.harness import measured_at

    results = json.loads((root / "training/results/compare_plans.json").read_text())
    lines = []
    for found in summary(results):
        if not found["named"]:
            continue  # not all sets of this size are trained yet
        for name, plan in found["named"].items():
            kept = ", ".join(map(str, plan["keep"]))
            lines.append([str(found["kept"]), name, kept, f"{plan['kl']:.4f}", f"{plan['ppl_ratio']:.4f}"])
        random = (found["kl"], found["ppl_ratio"])
        lines.append([str(found["kept"]), f"mean of all {found['plans']}", "", *(f"{f['mean']:.4f}" for f in random)])
        lines.append([str(found["kept"]), "worst of them", "", *(f"{f['worst']:.4f}" for f in random)])
    head = ["layers kept", "plan", "which", "KL to the teacher", "perplexity ratio"]
    return markdown(head, lines) + f"\n\nHeld-out text; {measured_at(results)}."


# by the first word of a name; what follows are arguments
def teacher_table(root: Path) -> str:
    """The families that can be converted, and those that cannot."""
    from hf_memmix.conversion.teachers_table import teachers_table  # here: it imports torch

    return teachers_table()


TABLES = {
    "demo": demo_table,
    "students": student_table,
    "kernels": kernel_table,
    "generate": generate_table,
    "op": op_table,
    "coffee_grid": coffee_grid_table,
    "coffee_draws": coffee_draws_table,
    "lattice_profile": lattice_profile_table,
    "lattice_targets": lattice_targets_table,
    "lattice_counters": lattice_counters_table,
    "lattice_frozen": lattice_frozen_table,
    "results": experiment_tables,
    "teachers": teacher_table,
    "gpus": gpus_table,
    "plans": plans_table,
}
