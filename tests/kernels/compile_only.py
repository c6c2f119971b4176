"""Compiles every kernel that an op launches for a GPU, by default an H200. It launches no kernel and needs no GPU.

    python tests/kernels/compile_only.py gla gka --dtypes bfloat16 --sizes 64x32
    python tests/kernels/compile_only.py gla --target gfx942

It prints one line per kernel: registers per thread, bytes of local memory (spills and stack) and of shared memory, and
the constants. A line that starts with BAD reports a defect, and the exit status is then 1: a kernel does not compile,
takes more shared memory than the GPU has, or, for an H200, its SASS has a fault. The ops run on CPU tensors that
report a GPU as their device, with a Triton driver that only names its target. Their results are not valid.
"""

import argparse
import dataclasses
import itertools
import json
import os
import sys
from pathlib import Path
from typing import NamedTuple

if __name__ == "__main__":
    # Triton and the ops read these at their import; with CPU tensors the script also runs on a machine with a GPU
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ.pop("HF_MEMMIX_BACKEND", None)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

import sass
import torch
import triton
from checks import outputs_and_gradients
from gpu_targets import TARGETS
from ops_table import OPS, Op, Shape
from pool import Pool
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from hf_memmix_kernels import _device, chunk_window, window_step
from hf_memmix_kernels._device import Device
from hf_memmix_kernels.window import window_state_shapes

NAMES = [*(op.name for op in OPS), "window"]
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


class Layout(NamedTuple):
    """What Triton specialises a kernel for, besides dtypes and head sizes."""

    shape: Shape
    bounds: list[int] | None
    carried: bool
    aligned: bool = True  # addresses, to 16 bytes


# some have grouped heads, sizes that Triton knows to be multiples of 16 or 1, and a carried state
LAYOUTS = {
    "batched": Layout(Shape(2, 128, 4, 4, 0, 0), None, True),
    "packed": Layout(Shape(1, 130, 4, 2, 0, 0), [0, 50, 130], False),
    "one token": Layout(Shape(2, 1, 4, 2, 0, 0), None, True),
    "unaligned": Layout(Shape(1, 130, 4, 2, 0, 0), None, True, aligned=False),
}


class Driver:
    """The part of a Triton driver that compilation needs."""

    def __init__(self, device: Device):
        self.target = GPUTarget("cuda", device.capability, 32) if device.nvidia else GPUTarget("hip", device.arch, 64)

    def get_current_target(self):
        return self.target

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


class Failure(NamedTuple):
    """A kernel that does not compile, and the first line of the compiler's error."""

    name: str
    error: str


class Kernels:
    """After `install`, the kernels that ops launch are compiled and collected, and not run."""

    def __init__(self, target: str = "sm_90"):
        self.device = TARGETS[target]
        self.found, self.seen = [], set()

    def install(self) -> None:
        triton.runtime.driver.set_active(Driver(self.device))
        torch.Tensor.is_cuda = property(lambda tensor: True)
        torch.Tensor.is_cpu = property(lambda tensor: False)  # else native code would run, and no kernel
        torch.cuda.is_current_stream_capturing = lambda: False
        _device.of_index = lambda index: self.device
        # before the first kernel is imported
        torch.version.hip = None if self.device.nvidia else "compile only"
        run = JITFunction.run

        def compile_only(function, *args, grid, warmup, **options):
            try:
                kernel = run(function, *args, grid=grid, warmup=True, **options)
                key = kernel.hash
            except Exception as error:
                # the passes print their reasons themselves
                kernel = Failure(function.__name__, f"{type(error).__name__}: {error}".splitlines()[0])
                key = kernel
            if key not in self.seen:
                self.seen.add(key)
                self.found.append(kernel)
            return kernel

        JITFunction.run = compile_only

    def take(self) -> list:
        """The kernels that were compiled, or failed to, since the last call."""
        found, self.found = self.found, []
        return found


def unaligned(x: torch.Tensor) -> torch.Tensor:
    """The same numbers, one element after an aligned address."""
    return torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape).copy_(x)


def launch_everything(op: Op, layout: Layout, D: int, Dv: int, dtype: torch.dtype) -> None:
    """Forward and backward, forward without gradients, and decode steps: on a batch of states and on pages."""
    shape, bounds, carried, aligned = layout
    shape = shape._replace(D=D, Dv=Dv)
    cu_seqlens = None if bounds is None else torch.tensor(bounds, dtype=torch.int32)
    inputs = op.draw(shape, dtype)
    state = op.draw_state(shape, shape.B if bounds is None else len(bounds) - 1, dtype)
    if not aligned:
        inputs, state = {name: unaligned(t) for name, t in inputs.items()}, tuple(map(unaligned, state))
    outputs_and_gradients(op, op.fast, inputs, state if carried else None, cu_seqlens, weights=[])
    with torch.no_grad():
        op.run(op.fast, inputs, state if carried else None, cu_seqlens)
        one, state = op.tokens(inputs, slice(0, 1)), op.draw_state(shape, shape.B, dtype)
        op.step(op, one, state)
        rows = list(range(shape.B))
        op.step(op, one, Pool(state, rows, shape.B, gap=64).states, torch.tensor(rows, dtype=torch.int32))


def launch_window(size: int, dtype: torch.dtype, layout: Layout = LAYOUTS["batched"], sinks: int = 0) -> None:
    """The same for a window of 64 tokens, which has no row of `OPS`; with and without a carried state."""
    (B, T, H, Hk, _, _), bounds, _, aligned = layout
    given, N = {"window": 64, "sinks": sinks}, B if bounds is None else len(bounds) - 1
    cu_seqlens = None if bounds is None else torch.tensor(bounds, dtype=torch.int32)
    *shapes, counts = window_state_shapes(N, Hk, size, **given)
    state = (*(torch.ones(shape, dtype=dtype) for shape in shapes), torch.ones(counts, dtype=torch.long))
    for start in (None, state):
        x = [torch.ones(B, T, heads, size, dtype=dtype) for heads in (H, Hk, Hk)]
        x = [(t if aligned else unaligned(t)).requires_grad_() for t in x]
        chunk_window(*x, initial_state=start, cu_seqlens=cu_seqlens, **given)[0].sum().backward()
    with torch.no_grad():
        one, rows = [torch.ones(N, 1, heads, size, dtype=dtype) for heads in (H, Hk, Hk)], list(range(N))
        window_step(*one, state, **given)
        pages = Pool(state, rows, N, gap=64).states
        window_step(*one, pages, state_indices=torch.tensor(rows, dtype=torch.int32), **given)


def launch(name: str, layout: Layout, size: str, dtype: torch.dtype, options: dict) -> None:
    """Every kernel of an op by its name, for head sizes "DxDv"."""
    D, Dv = map(int, size.split("x"))
    if name == "window":
        return launch_window(D, dtype, layout, **options)
    op = next(op for op in OPS if op.name == name)
    return launch_everything(dataclasses.replace(op, options={**op.options, **options}), layout, D, Dv, dtype)


def report(kernel, case: str, device: Device) -> tuple[str, bool]:
    """The lines to print for a kernel (several if it has a defect), and whether it has a defect."""
    if isinstance(kernel, Failure):
        return f"BAD {case} {kernel.name} does not compile: {kernel.error}", True
    meta, sizes, faults = kernel.metadata, "", []
    if device.nvidia:
        cuobjdump, cubin = str(TOOLS / "cuobjdump"), kernel.asm["cubin"]
        used = sass.resources(cubin, cuobjdump)
        sizes = f"registers={used['reg']} local={used['local'] + used['stack']} "
        if device.arch == "sm_90":
            faults = list(map(str, sass.defects(sass.disassemble(cubin, cuobjdump))))
    if meta.shared > device.shared:
        faults.append(f"{meta.shared} bytes of shared memory, the limit is {device.shared}")
    names = kernel.src.fn.arg_names
    # (3,) is the fourth argument; (3, 1) is the second member of the fourth argument, which is then a tuple
    constants = " ".join(
        f"{names[first]}{''.join(f'[{i}]' for i in rest)}={value}"
        for (first, *rest), value in kernel.src.constants.items()
    )
    line = (
        f"{case} {kernel.name} {sizes}shared={meta.shared} warps={meta.num_warps} stages={meta.num_stages} {constants}"
    )
    return "\n    ".join([f"{'BAD' if faults else 'ok '} {line}", *faults]), bool(faults)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("ops", nargs="+", choices=NAMES)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float16", "float32"])
    parser.add_argument("--sizes", nargs="+", default=["64x64"], help="head sizes D x Dv")
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), choices=list(LAYOUTS))
    parser.add_argument("--target", default="sm_90", choices=list(TARGETS))
    parser.add_argument("--options", type=json.loads, default={}, help="options of the ops, as JSON")
    args = parser.parse_args(arguments)
    kernels, failed = Kernels(args.target), False
    kernels.install()
    for name, dtype, size, layout in itertools.product(args.ops, args.dtypes, args.sizes, args.layouts):
        case = f"{name} {dtype} {size} {layout}"
        launch(name, LAYOUTS[layout], size, getattr(torch, dtype), args.options)
        found = kernels.take()
        if not found and not kernels.seen:
            print(f"BAD {case}: no kernel was compiled", flush=True)
            failed = True
        for kernel in found:
            line, bad = report(kernel, case, kernels.device)
            print(line, flush=True)
            failed |= bad
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
