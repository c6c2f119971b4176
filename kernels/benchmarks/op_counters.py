"""What limits the kernels of the ops whose rows miss their goals? Hardware counters of one GPU, by Nsight Compute.

    python kernels/benchmarks/op_counters.py --out kernels/benchmarks/results/op_counters_h200.json

One forward and backward of every case, or one decode step, in bf16; each kernel once per case. `warp` and `hbm` are as
in lattice_counters.py. `tensor`, `special` and `shared` are the shares of their peak rates that the tensor cores, the
unit of special functions and shared memory reach; `local_loads` and `local_stores` are those of spilled registers, in
millions of instructions of a warp. Counters that Nsight Compute does not have for the GPU are left out.
"""

import argparse
import json
import subprocess
from pathlib import Path

import torch
from benchmark import BENCHES
from lattice_counters import counters, shares

# name of a column: counters, of which the first that Nsight Compute has for this GPU is read; and what divides it
ACTIVE, ELAPSED = "avg.pct_of_peak_sustained_active", "avg.pct_of_peak_sustained_elapsed"
MORE = {
    "tensor": (("sm__pipe_tensor_cycles_active", "sm__pipe_tensor_op_hmma_cycles_active"), ACTIVE, 100),
    "special": (("sm__inst_executed_pipe_xu",), ACTIVE, 100),
    "shared": (("l1tex__data_pipe_lsu_wavefronts_mem_shared",), ELAPSED, 100),
    "local_loads": (("smsp__sass_inst_executed_op_local_ld", "smsp__inst_executed_op_local_ld"), "sum", 1e6),
    "local_stores": (("smsp__sass_inst_executed_op_local_st", "smsp__inst_executed_op_local_st"), "sum", 1e6),
}
# op, fields of its row, shape; a shape of one token is a decode step
CASES = [
    ("gka", {"iterations": [12, 10]}, (4, 8192, 8, 128)),
    ("gka", {"iterations": [12, 10]}, (4, 8192, 4, 256)),
    ("gka", {"iterations": [12, 10]}, (64, 1, 32, 128)),
    ("gka", {"iterations": [12, 10]}, (64, 1, 16, 256)),
    ("coffee", {}, (8, 4096, 1536, 16)),
    ("ska", {"rank": 32}, (8, 4096, 12, 64)),
    ("ska", {"rank": 64}, (8, 4096, 12, 64)),
    ("ssd", {"by": "gla"}, (8, 4096, 12, 64)),
]
KERNELS = "^(gka|gla|coffee|ska)_"


def once(case: int) -> None:
    """Run a case once."""
    op, fields, shape = CASES[case]
    bench = next(b for b in BENCHES if b.op == op and fields.items() <= b.fields.items())
    torch.manual_seed(0)
    inputs = bench.draw(*shape)
    if shape[1] == 1:
        bench.step(inputs, bench.state(shape[0], *shape[2:]))
    else:
        leaves = {name: t.requires_grad_() for name, t in inputs.items()}
        o = bench.forward(leaves)[0]
        torch.autograd.grad(o, list(leaves.values()), torch.randn_like(o))
    torch.cuda.synchronize()


def available() -> dict[str, tuple[str, float]]:
    """The counter and the divisor of each column of `MORE`."""
    listed = subprocess.run(["ncu", "--query-metrics"], capture_output=True, text=True).stdout
    names = {line.split()[0] for line in listed.splitlines() if line.strip()}
    found = {}
    for column, (candidates, suffix, divisor) in MORE.items():
        if here := [name for name in candidates if name in names]:
            found[column] = (f"{here[0]}.{suffix}", divisor)
    return found


def rows_of(case: int, columns: dict[str, tuple[str, float]]) -> list[dict]:
    """A row per kernel of a case: of launches with the same name, the first."""
    op, fields, shape = CASES[case]
    rows, sizes = {}, dict(zip("BTHD", shape, strict=True))
    command = [__file__, "--once", str(case)]
    for row in counters(command, KERNELS, tuple(metric for metric, _ in columns.values())):
        found = shares(row)
        for column, (metric, divisor) in columns.items():
            found[column] = round(float(row[metric].replace(",", "")) / divisor, 3)
        rows.setdefault(found["kernel"], {"op": op, **fields, **sizes, **found})
    return list(rows.values())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", default="unknown", help="commit to record")
    parser.add_argument("--cases", nargs="+", type=int, default=list(range(len(CASES))), help="only these of CASES")
    parser.add_argument("--once", type=int, help="run this case once; ncu runs the script with this option")
    args = parser.parse_args()
    if args.once is not None:
        once(args.once)
        return
    found = {"gpu": torch.cuda.get_device_name(), "commit": args.commit, "rows": []}
    columns = available()
    for case in args.cases:
        found["rows"] += rows_of(case, columns)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
