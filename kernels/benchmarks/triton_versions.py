"""Errors and times of every op with the Triton that is installed, to compare versions of Triton on one GPU.

    cd kernels/benchmarks
    export PYTHONPATH=../../tests/kernels:../../tests
    python triton_versions.py compile --ops gla      # fills Triton's cache, so that the times need no compiler
    python triton_versions.py errors --out results/triton_versions_h200.json
    python triton_versions.py times --out results/triton_versions_h200.json
    python triton_versions.py traps --out results/triton_versions_h200.json

A row is one measurement with one version of Triton; rows of other versions stay in the file. "errors": the largest
error of outputs, states and gradients against float64, as a part of what the tests allow (1 is the limit). "times": as
in `benchmark.py`, at one shape per op.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import torch
import triton
from benchmark import BENCHES, Bench, commit, time_chunks, time_decode
from ops_table import OPS, Op, Shape
from triton_traps import TRAPS, parts_of_tolerance, trap

ACCURACY_SHAPE = Shape(1, 200, 8, 4, 128, 128)
DTYPES = (torch.bfloat16, torch.float32)
# name in the file: (op of benchmark.py, fields that choose one of its rows)
TIMED = {
    "short_conv": ("short_conv", {}),
    "gla": ("gla", {}),
    "gka": ("gka", {"iterations": [12, 10]}),
    "coffee": ("coffee", {}),
    "lattice dec": ("lattice", {"variant": "dec"}),
    "lattice enc": ("lattice", {"variant": "enc"}),
    "ska 32": ("ska", {"rank": 32}),
    "ska 64": ("ska", {"rank": 64}),
}
KEYS = ("measured", "triton", "op", "dtype", "pass")


def bench_of(name: str) -> Bench:
    op, fields = TIMED[name]
    return next(b for b in BENCHES if b.op == op and fields.items() <= b.fields.items())


def errors(op: Op) -> Iterator[dict]:
    """One row per dtype: the largest error as a part of the tolerance, and of which tensor."""
    for dtype in DTYPES if op.low_precision else DTYPES[1:]:
        parts = parts_of_tolerance(op, ACCURACY_SHAPE, dtype)
        worst = max(parts, key=parts.get)
        yield {"op": op.name, "dtype": str(dtype).removeprefix("torch."), "part": round(parts[worst], 4), "of": worst}


def times(name: str) -> Iterator[dict]:
    """Forward, forward and backward, and a decode step of 8 sequences, in bf16."""
    bench = bench_of(name)
    found = time_chunks(bench, bench.chunk_shapes[0]) + time_decode(bench, bench.decode_shapes[1])
    for row in found:
        yield {
            "op": name,
            "dtype": "bfloat16",
            "pass": row["pass"],
            "ms": row["ms"],
            "kernel_ms": row.get("kernel_ms"),
        }


def compile_timed(name: str) -> None:
    """Launch once what `times` will launch."""
    bench = bench_of(name)
    inputs = {k: t.requires_grad_() for k, t in bench.draw(*bench.chunk_shapes[0]).items()}
    with torch.no_grad():
        bench.forward(inputs)
    bench.forward(inputs)[0].float().sum().backward()
    B, _, H, D = bench.decode_shapes[1]
    with torch.no_grad():
        bench.step(bench.draw(*bench.decode_shapes[1]), bench.state(B, H, D))
    torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measure", choices=["compile", "errors", "times", "traps"])
    parser.add_argument("--ops", nargs="+", help="names; all by default")
    parser.add_argument("--out", type=Path, help="JSON file of the rows; without it they are only printed")
    parser.add_argument("--commit", default=commit(), help="commit to record; needed where there is no git checkout")
    args = parser.parse_args()
    known = {"errors": [op.name for op in OPS], "traps": list(TRAPS)}.get(args.measure, list(TIMED))
    if unknown := sorted(set(args.ops or []) - set(known)):
        parser.error(f"{args.measure} has no op {unknown[0]!r}; choose from {', '.join(known)}")
    if not torch.cuda.is_available():
        parser.error("this needs an NVIDIA GPU, but torch finds none")
    machine = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "commit": args.commit}
    for name in args.ops or known:
        if args.measure == "compile":
            compile_timed(name)
            continue
        if args.measure == "errors":
            found = errors(next(op for op in OPS if op.name == name))
        else:
            found = trap(name) if args.measure == "traps" else times(name)
        for result in found:
            row = {"measured": args.measure, "triton": triton.__version__, **result, **machine}
            print(json.dumps(row), flush=True)
            if args.out:
                kept = json.loads(args.out.read_text()) if args.out.exists() else []
                kept = [old for old in kept if any(old.get(key) != row.get(key) for key in KEYS)]
                args.out.write_text("[\n" + ",\n".join(map(json.dumps, [*kept, row])) + "\n]\n")


if __name__ == "__main__":
    main()
