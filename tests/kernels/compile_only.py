"""Compiles every kernel that an op launches for an H200 and checks its SASS. It launches no kernel and needs no GPU.

    python tests/kernels/compile_only.py gla gka --dtypes bfloat16 --sizes 64x32

It prints one line per kernel: registers per thread, bytes of local memory (spills and stack) and of shared memory, and
the constants. A line that starts with BAD reports a defect, and the exit status is then 1. The ops run on CPU tensors
that report a GPU as their device, with a Triton driver that only names its target. Their results are not valid.
"""

import argparse
import dataclasses
import json
import os
import sys
from pathlib import Path

if __name__ == "__main__":
    # Triton and the ops read these at their import; with CPU tensors the script also runs on a machine with a GPU
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ.pop("HF_MEMMIX_BACKEND", None)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

import sass
import torch
import triton
from checks import outputs_and_gradients
from ops_table import OPS, Op, Shape
from pool import Pool
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
MAX_SHARED = 227 * 1024
# half the layouts have grouped heads, sizes that Triton knows to be multiples of 16, and a carried state
LAYOUTS = {
    "batched": (Shape(2, 128, 4, 4, 0, 0), None, True),
    "packed": (Shape(1, 130, 4, 2, 0, 0), [0, 50, 130], False),
}


class Driver:
    """The part of a Triton driver that compilation needs."""

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


class Kernels:
    """After `install`, the kernels that ops launch are compiled and collected, and not run."""

    def __init__(self):
        self.found, self.seen = [], set()

    def install(self) -> None:
        triton.runtime.driver.set_active(Driver())
        torch.Tensor.is_cuda = property(lambda tensor: True)
        torch.cuda.is_current_stream_capturing = lambda: False
        run = JITFunction.run

        def compile_only(function, *args, grid, warmup, **options):
            kernel = run(function, *args, grid=grid, warmup=True, **options)
            if kernel.hash not in self.seen:
                self.seen.add(kernel.hash)
                self.found.append(kernel)
            return kernel

        JITFunction.run = compile_only

    def take(self) -> list:
        """The kernels that were compiled since the last call."""
        found, self.found = self.found, []
        return found


def launch_everything(op: Op, shape: Shape, dtype: torch.dtype, bounds: list[int] | None, carried: bool) -> None:
    """Forward and backward, forward without gradients, and decode steps: on a batch of states and on pages."""
    cu_seqlens = None if bounds is None else torch.tensor(bounds, dtype=torch.int32)
    inputs = op.draw(shape, dtype)
    state = op.draw_state(shape, shape.B if bounds is None else len(bounds) - 1, dtype)
    outputs_and_gradients(op, op.fast, inputs, state if carried else None, cu_seqlens, weights=[])
    with torch.no_grad():
        op.run(op.fast, inputs, state if carried else None, cu_seqlens)
        one, state = op.tokens(inputs, slice(0, 1)), op.draw_state(shape, shape.B, dtype)
        op.step(op, one, state)
        rows = list(range(shape.B))
        op.step(op, one, Pool(state, rows, shape.B, gap=64).states, torch.tensor(rows, dtype=torch.int32))


def report(kernel, case: str) -> tuple[str, bool]:
    """The lines to print for a kernel (several if it has a defect), and whether it has a defect."""
    cuobjdump = str(TOOLS / "cuobjdump")
    cubin, meta = kernel.asm["cubin"], kernel.metadata
    used = sass.resources(cubin, cuobjdump)
    faults = list(map(str, sass.defects(sass.disassemble(cubin, cuobjdump))))
    if meta.shared > MAX_SHARED:
        faults.append(f"{meta.shared} bytes of shared memory, the limit is {MAX_SHARED}")
    names = kernel.src.fn.arg_names
    # (3,) is the fourth argument; (3, 1) is the second member of the fourth argument, which is then a tuple
    constants = " ".join(
        f"{names[first]}{''.join(f'[{i}]' for i in rest)}={value}"
        for (first, *rest), value in kernel.src.constants.items()
    )
    sizes = f"registers={used['reg']} local={used['local'] + used['stack']} shared={meta.shared}"
    line = f"{case} {kernel.name} {sizes} warps={meta.num_warps} stages={meta.num_stages} {constants}"
    return "\n    ".join([f"{'BAD' if faults else 'ok '} {line}", *faults]), bool(faults)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("ops", nargs="+", choices=[op.name for op in OPS])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float16", "float32"])
    parser.add_argument("--sizes", nargs="+", default=["64x64"], help="head sizes D x Dv")
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), choices=list(LAYOUTS))
    parser.add_argument("--options", type=json.loads, default={}, help="options of the ops, as JSON")
    args = parser.parse_args(arguments)
    kernels, failed = Kernels(), False
    kernels.install()
    for op in (op for op in OPS if op.name in args.ops):
        op = dataclasses.replace(op, options={**op.options, **args.options})
        for dtype in args.dtypes:
            for size in args.sizes:
                D, Dv = map(int, size.split("x"))
                for layout in args.layouts:
                    shape, bounds, carried = LAYOUTS[layout]
                    launch_everything(op, shape._replace(D=D, Dv=Dv), getattr(torch, dtype), bounds, carried)
                    for kernel in kernels.take():
                        line, bad = report(kernel, f"{op.name} {dtype} {size} {layout}")
                        print(line, flush=True)
                        failed |= bad
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
