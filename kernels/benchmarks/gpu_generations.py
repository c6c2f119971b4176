"""Compiles every op for each generation of GPUs; notes what compiles, and the shared memory it takes. Needs no GPU.

    cd kernels/benchmarks
    PYTHONPATH=../../tests/kernels python gpu_generations.py --out results/gpu_generations.json

A row is one op, size, dtype and GPU: forward, backward and decode steps. Each is compiled in a process of its own,
because an assertion of the compiler ends the process. Rows of other versions of Triton stay in the file. With
`--missing`, a run that was cut off goes on where it stopped, first with the cells of the table that have no row.
`python -m hf_memmix.training.experiments.figures` makes the table in kernels/README.md.
"""

import argparse
import json
import os
import select
import time
from collections.abc import Callable
from pathlib import Path

if __name__ == "__main__":
    # as in compile_only.py: read at the import of Triton and of the ops
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ.pop("HF_MEMMIX_BACKEND", None)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

import compile_only
import torch
import triton
from gpu_targets import TARGETS
from ops_table import OPS

from hf_memmix_kernels import rowwise

# name in the file: (row of OPS, head sizes or ranks); an op of one size does not take its tiles by it
CASES = {
    "short_conv": ("short_conv", [64]),
    "rowwise": (None, [64]),
    "gla": ("gla", [64, 128, 256]),
    "gka": ("gka_refined", [64, 128, 256]),
    "coffee": ("coffee", [64]),
    "lattice dec": ("lattice", [64, 128]),
    "lattice enc": ("lattice_enc", [64, 128]),
    "ska": ("ska", [32, 64]),
    "window": (None, [64, 128, 256]),
    "gated_delta": ("gated_delta", [128, 256]),
    "gated_delta channels": ("gated_delta_channels", [128, 256]),
}
DTYPES = ["bfloat16", "float32"]


def launch_rowwise(size: int, dtype: torch.dtype) -> None:
    """Every rowwise function, forward and backward."""
    draw = lambda *shape, of=dtype: torch.ones(*shape, dtype=of).requires_grad_()  # noqa: E731
    cos, sin = (torch.ones(2, 16, 32, dtype=dtype) for _ in range(2))
    outputs = [
        rowwise.rotate(draw(2, 16, 4, 64), cos, sin),
        rowwise.unit_heads(draw(2, 16, 4, 64), cos, sin, 1e-6),
        rowwise.gated_norm(draw(2, 16, 4, 64), draw(2, 16, 4, 64), draw(64), 1e-6),
        rowwise.gated_product(draw(2, 16, 256), draw(2, 16, 256)),
        *rowwise.decay(draw(2, 16, 4), draw(4, of=torch.float32), draw(4, of=torch.float32)),
    ]
    for output in outputs:
        output.sum().backward(retain_graph=True)


def launches(name: str, size: int, dtype: str) -> Callable[[], None]:
    """A function that launches every kernel of a row."""
    row, _ = CASES[name]
    if row is None:
        launch = {"rowwise": launch_rowwise, "window": compile_only.launch_window}[name]
        return lambda: launch(size, getattr(torch, dtype))
    op = next(op for op in OPS if op.name == row)
    layout = compile_only.LAYOUTS["batched"]
    return lambda: compile_only.launch_everything(op, layout, size, size, getattr(torch, dtype))


def measured(arch: str, name: str, size: int, dtype: str) -> dict:
    """What a row says of its kernels."""
    kernels = compile_only.Kernels(arch)
    kernels.install()
    launches(name, size, dtype)()
    found = kernels.take()
    failed = [kernel for kernel in found if isinstance(kernel, compile_only.Failure)]
    made = [kernel for kernel in found if not isinstance(kernel, compile_only.Failure)]
    largest = max(made, key=lambda kernel: kernel.metadata.shared, default=None)
    return {
        "kernels": len(found),
        "failed": sorted({kernel.name for kernel in failed}),
        "limit": kernels.device.shared,
        "shared": largest.metadata.shared if made else 0,
        "largest": largest.name if made else "",
    }


def start(function: Callable[[], dict]) -> tuple[int, int]:
    """A child process that runs `function`: its id, and the pipe to which it writes the result as JSON."""
    read, write = os.pipe()
    child = os.fork()
    if child:
        os.close(write)
        return child, read
    os.close(read)
    try:
        result = function()
    except Exception as error:
        result = {"error": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
    os.write(write, json.dumps(result).encode())
    os._exit(0)


def finish(child: int, pipe: int) -> dict:
    """What the child wrote; "crashed" if the compiler ended it."""
    with os.fdopen(pipe) as results:
        text = results.read()
    os.waitpid(child, 0)
    return json.loads(text) if text else {"crashed": True}


def same_case(row: dict, key: dict) -> bool:
    """Whether `row` is the result for `key`."""
    return all(row[field] == value for field, value in key.items())


def tried(rows: list[dict], key: dict) -> bool:
    """Whether a row has the same op, size and GPU, of whatever dtype and version of Triton."""
    return any(same_case(row, {field: key[field] for field in ("arch", "op", "size")}) for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--archs", nargs="+", default=list(TARGETS), choices=list(TARGETS))
    parser.add_argument("--ops", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--dtypes", nargs="+", default=DTYPES, choices=DTYPES)
    parser.add_argument("--jobs", type=int, default=1, help="rows at the same time")
    parser.add_argument("--missing", action="store_true", help="only rows that the file does not have yet")
    args = parser.parse_args()
    rows = json.loads(args.out.read_text()) if args.out.exists() else []
    waiting = [
        {"triton": triton.__version__, "arch": arch, "op": name, "size": size, "dtype": dtype}
        for name in args.ops
        for size in CASES[name][1]
        for dtype in args.dtypes
        for arch in args.archs
    ]
    if args.missing:
        waiting = [key for key in waiting if not any(same_case(row, key) for row in rows)]
        waiting.sort(key=lambda key: (tried(rows, key), key["dtype"] == "float32"))
    running = {}  # pipe: (child, key, when it began)
    while waiting or running:
        while waiting and len(running) < args.jobs:
            key = waiting.pop(0)
            child, pipe = start(lambda key=key: measured(key["arch"], key["op"], key["size"], key["dtype"]))
            running[pipe] = child, key, time.monotonic()
        for pipe in select.select(list(running), [], [])[0]:
            child, key, began = running.pop(pipe)
            row = key | finish(child, pipe)
            print(f"{time.monotonic() - began:.0f} s {json.dumps(row)}", flush=True)
            rows = [old for old in rows if not same_case(old, key)] + [row]
            args.out.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")


if __name__ == "__main__":
    main()
