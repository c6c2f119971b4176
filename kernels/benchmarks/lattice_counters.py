"""What do the warps of every Lattice kernel wait for? Reads the hardware counters of one GPU with Nsight Compute.

    python kernels/benchmarks/lattice_counters.py --out kernels/benchmarks/results/lattice_counters_h200.json

The shape is B=8, T=4096, 12 heads of 64 channels and slots in bf16; one forward and backward of each variant. `warp`
holds shares of the time of a warp: `issue`, the share in which it issues an instruction, then the reasons for which it
waits, the longest first. `hbm` is the share of the memory's peak bandwidth. The counters are read in several runs of a
kernel with cold caches, so they give no times; lattice_profile.py measures times.
"""

import argparse
import csv
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from lattice_benches import SHAPES, draw, state

from hf_memmix_kernels import chunk_lattice

WAITS = {
    "selected": "issue",
    "wait": "fixed latency",
    "long_scoreboard": "global memory",
    "short_scoreboard": "shared memory and shuffles",
    "barrier": "barrier",
    "not_selected": "other warps",
    "math_pipe_throttle": "arithmetic units",
    "mio_throttle": "queue of shared memory",
    "lg_throttle": "queue of global memory",
    "dispatch_stall": "dispatch",
    "no_instruction": "instruction fetch",
}
STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
LATENCY = "smsp__average_warp_latency_per_inst_issued.ratio"
HBM = "dram__throughput.avg.pct_of_peak_sustained_elapsed"
SMALLEST = 0.02  # smaller shares are not listed


def once(variant: str) -> None:
    """Run one forward and backward of a variant."""
    B, T, H, D = SHAPES[0]
    torch.manual_seed(0)
    inputs = {name: x.requires_grad_() for name, x in draw(B, T, H, D).items()}
    (start,) = state(B, H, D)
    o, _ = chunk_lattice(**inputs, variant=variant, initial_state=start)
    torch.autograd.grad(o, list(inputs.values()), torch.randn_like(o))
    torch.cuda.synchronize()


def counters(command: list[str], kernels: str, more: tuple[str, ...] = ()) -> list[dict[str, str]]:
    """One row of counters per kernel launch of a command, in the order of the launches.

    Args:
        command: a Python script and its arguments.
        kernels: regular expression of the names of the kernels.
        more: further counters.

    Raises:
        RuntimeError: ncu is missing or may not read the counters; the message contains the output of ncu.
    """
    metrics = [HBM, LATENCY, *(STALL.format(name) for name in WAITS), *more]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "counters.csv"
        ncu = ["ncu", "--clock-control", "none", "--csv", "--page", "raw", "--log-file", str(log)]
        ncu += ["--metrics", ",".join(metrics), "-k", f"regex:{kernels}", sys.executable]
        run = subprocess.run([*ncu, *command], capture_output=True, text=True)
        text = log.read_text() if log.exists() else ""
        if run.returncode or LATENCY not in text:
            raise RuntimeError(f"ncu read no counters, exit status {run.returncode}: {(run.stderr + text)[-500:]}")
    lines = text.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith('"ID"'))
    units, *rows = csv.DictReader(lines[first:])  # the first line below the names holds the units
    return rows


def shares(row: dict[str, str]) -> dict:
    """The row of the result for one kernel launch."""
    parts = {name: float(row[STALL.format(stall)]) / float(row[LATENCY]) for stall, name in WAITS.items()}
    named = {name: round(x, 3) for name, x in sorted(parts.items(), key=lambda item: -item[1]) if x >= SMALLEST}
    return {"kernel": row["Kernel Name"].split("(")[0], "warp": named, "hbm": round(float(row[HBM]) / 100, 3)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", default="unknown", help="commit to record")
    parser.add_argument(
        "--once", help="run one forward and backward of this variant; ncu runs the script with this option"
    )
    args = parser.parse_args()
    if args.once:
        once(args.once)
        return
    rows = [
        {"variant": variant, **shares(row)}
        for variant in ("dec", "enc", "sim")
        for row in counters([__file__, "--once", variant], "^lattice_")
    ]
    found = {"gpu": torch.cuda.get_device_name(), "commit": args.commit, "rows": rows}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
