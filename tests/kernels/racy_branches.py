"""Finds branches of steps on pages that depend on memory which another program may write; needs no GPU.

    python tests/kernels/racy_branches.py

Rows that only pad a batch share a page, so several programs write its states at the same time. A number that each
thread loads from there may differ between the threads of one program, and even of one warp. Where such a number is
only computed with, the result of a row that nobody reads is wrong. Where it decides a branch or the end of a loop, the
threads of a warp diverge although the compiler takes the branch for uniform, and any address may go wrong. A number
that one thread reads by an atomic operation is the same for all (`_page_offset.same_for_all`).

The check follows all values in Triton's own code (TTIR) from the loads of memory that the kernel also writes to the
conditions. It prints one line per kernel and exits with 1 if a branch is racy or no kernel was found.
"""

import os
import re
import sys

if __name__ == "__main__":
    # Triton and the ops read these at their import; with CPU tensors the script also runs on a machine with a GPU
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ.pop("HF_MEMMIX_BACKEND", None)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

import torch
from compile_only import LAYOUTS, Kernels
from ops_table import OPS
from pool import Pool
from triton.backends.nvidia.compiler import CUDABackend

from hf_memmix_kernels import window_step
from hf_memmix_kernels.window import window_state_shapes

_NAME = re.compile(r"%[\w$.-]+")
_DEFINED = re.compile(r"^\s*(%[\w$.-]+)(?::\d+)? = (.*)")
_CARRIED = re.compile(r"(%[\w$.-]+) = (%[\w$.-]+)")  # by a loop: the name within it, and the value before it
_CONDITION = re.compile(r"scf\.(?:if|condition|for %[\w$.-]+ =)\W(.*?)(?:iter_args|\)|{|$)")
_WRITES = re.compile(r"tt\.(?:store|atomic)[^%]*(%[\w$.-]+)")


def racy_branches(ttir: str) -> list[str]:
    """The lines of branches and loops whose conditions depend on a load of memory that the kernel writes."""
    header = next(line for line in ttir.splitlines() if "tt.func" in line)
    lines = [line.split(" loc(")[0] for line in ttir.splitlines() if not line.startswith("#") and line != header]
    bases = {name: {name} for name in re.findall(r"(%[\w$.-]+): !tt.ptr", header)}  # name: where a pointer points to
    read = {}  # name: the arguments whose memory it was loaded from, or computed from such numbers
    size = -1
    while size != sum(map(len, (*bases.values(), *read.values()))):  # loops carry values back
        size = sum(map(len, (*bases.values(), *read.values())))
        results = []  # of the regions around a line
        for line in lines:
            found = _DEFINED.match(line)
            name, text = found.groups() if found else (None, line.strip())
            used = _NAME.findall(text)
            if text.startswith("scf.yield"):
                name = results[-1]
            if name is not None:
                pointers = used[:1] if "tt.addptr" in text else used
                _add(bases, name, *(bases.get(x, ()) for x in pointers))
                if "tt.load" in text:
                    _add(read, name, bases.get(used[0], ()))
                if "tt.atomic" not in text:
                    _add(read, name, *(read.get(x, ()) for x in used))
            for carried, start in _CARRIED.findall(text.partition("iter_args")[2]):
                _add(bases, carried, bases.get(start, ()), bases.get(name, ()))
                _add(read, carried, read.get(start, ()), read.get(name, ()))
            if text.startswith("}") and "{" not in text and results:
                results.pop()
            if text.endswith("{") and not text.startswith("}"):
                results.append(name)
    written = set()
    for line in lines:
        found = _WRITES.search(line)
        if found:
            written |= bases.get(found[1], set())
    racy = []
    for line in lines:
        condition = _CONDITION.search(line)
        if condition and any(read.get(x, set()) & written for x in _NAME.findall(condition[1])):
            racy.append(line.strip())
    return racy


def _add(table: dict, name: str, *found) -> None:
    table.setdefault(name, set()).update(*found)


class _Enough(Exception):
    """No stage after TTIR is needed."""


def steps_on_pages() -> None:
    """Compile the steps of all ops on pages."""
    shape = LAYOUTS["batched"].shape._replace(T=1, D=64, Dv=64)
    rows, indices = list(range(shape.B)), torch.arange(shape.B, dtype=torch.int32)
    for op in OPS:
        state = op.draw_state(shape, shape.B, torch.bfloat16)
        one = op.tokens(op.draw(shape, torch.bfloat16), slice(0, 1))
        op.step(op, one, Pool(state, rows, shape.B, gap=64).states, indices)
    for sinks in (0, 1, 4):
        *slots, counts = window_state_shapes(shape.B, shape.Hk, 64, 64, sinks)
        state = (*(torch.ones(t, dtype=torch.bfloat16) for t in slots), torch.ones(counts, dtype=torch.long))
        x = [torch.ones(shape.B, 1, heads, 64, dtype=torch.bfloat16) for heads in (shape.H, shape.Hk, shape.Hk)]
        pages = Pool(state, rows, shape.B, gap=64).states
        window_step(*x, pages, window=64, sinks=sinks, state_indices=indices)


def main() -> int:
    found = {}

    def keep(module, *rest):
        text = str(module)
        found[text] = re.search(r"tt\.func public @(\w+)", text)[1]
        raise _Enough

    CUDABackend.make_ttgir = staticmethod(keep)
    kernels = Kernels()
    kernels.install()
    with torch.no_grad():
        steps_on_pages()
    failed = not any("window_step" in name for name in found.values())
    for text, name in found.items():
        racy = racy_branches(text)
        print("\n    ".join([f"{'BAD' if racy else 'ok '} {name}", *racy]), flush=True)
        failed |= bool(racy)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
