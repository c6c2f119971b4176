"""Writes a digest of the PTX of every kernel that an op launches, for an H200, and compares two files; needs no GPU.

    python tests/kernels/same_ptx.py record before.json gla ska     # in the checkout before the change
    python tests/kernels/same_ptx.py record after.json gla ska      # after it
    python tests/kernels/same_ptx.py compare before.json after.json

It proves that a move or a renaming of kernels leaves the generated code the same. The names of kernels and the line
numbers are removed from the PTX before it is hashed. The exit status of `compare` is 1 if a digest differs.
"""

import argparse
import dataclasses
import hashlib
import json
import os
import re
import sys
from pathlib import Path

if __name__ == "__main__":
    # Triton and the ops read these at their import; with CPU tensors the script also runs on a machine with a GPU
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ.pop("HF_MEMMIX_BACKEND", None)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ["TRITON_DISABLE_LINE_INFO"] = "1"

import torch
from compile_only import LAYOUTS, Kernels, launch_everything
from ops_table import OPS
from triton.backends.nvidia.compiler import CUDABackend

# options with which other kernels are compiled than with the op's defaults
OPTIONS = {
    "gla": [{"chunk_size": 32}],
    "coffee": [{"feedback": "input"}, {"feedback": "linear"}],
    "lattice": [{"l1": 0.1}],
    "lattice_free": [{"variant": "delta", "project": False}],
    "ska": [{"chunk_size": 16, "eps": 0.05, "spectral_norm": False}],
}


def digest(ptx: str, name: str) -> str:
    """The SHA-256 of PTX without comments, debug information and the kernel's name."""
    ptx = re.sub(r"//.*", "", ptx.replace(name, "KERNEL"))
    lines = (line.strip() for line in ptx.splitlines())
    kept = [line for line in lines if line and not line.startswith((".loc", ".file", ".section"))]
    return hashlib.sha256("\n".join(kept).encode()).hexdigest()


def record(names: list[str], dtypes: list[str], sizes: list[str]) -> dict[str, list[list[str]]]:
    """Pairs (kernel, digest) of every case "op options dtype size layout"."""
    # only the PTX is compared; assembling it would take most of the time
    CUDABackend.make_cubin = lambda self, src, metadata, opt, capability: src.encode()
    kernels, found = Kernels(), {}
    kernels.install()
    for op in (op for op in OPS if op.name in names):
        for options in [{}, *OPTIONS.get(op.name, [])]:
            variant = dataclasses.replace(op, options={**op.options, **options})
            for dtype in dtypes:
                for size in sizes:
                    D, Dv = map(int, size.split("x"))
                    for name, layout in LAYOUTS.items():
                        case = " ".join([op.name, json.dumps(options), dtype, size, name])
                        launch_everything(variant, layout, D, Dv, getattr(torch, dtype))
                        found[case] = [[k.name, digest(k.asm["ptx"], k.name)] for k in kernels.take()]
                        print(case, len(found[case]), flush=True)
    return found


def compare(before: dict, after: dict) -> list[str]:
    """A line for every case whose kernels differ."""
    lines = []
    for case in sorted(before.keys() | after.keys()):
        old, new = before.get(case, []), after.get(case, [])
        gone, come = sorted(d for _, d in old), sorted(d for _, d in new)
        if gone != come:
            lost = [name for name, d in old if d not in come]
            lines.append(
                f"{case}: {len(old)} kernels before, {len(new)} after; other PTX: {' '.join(lost) or 'only new'}"
            )
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    write = commands.add_parser("record")
    write.add_argument("file", type=Path)
    write.add_argument("ops", nargs="+", choices=[op.name for op in OPS])
    write.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    write.add_argument("--sizes", nargs="+", default=["64x64"], help="head sizes D x Dv")
    check = commands.add_parser("compare")
    check.add_argument("before", type=Path)
    check.add_argument("after", type=Path)
    args = parser.parse_args()
    if args.command == "record":
        args.file.write_text(json.dumps(record(args.ops, args.dtypes, args.sizes), indent=1) + "\n")
        return 0
    before, after = (json.loads(path.read_text()) for path in (args.before, args.after))
    lines = compare(before, after)
    print("\n".join(lines) or f"equal: {sum(map(len, before.values()))} kernels in {len(before)} cases")
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
