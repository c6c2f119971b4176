"""Counts instructions per warp and token of the Lattice kernels that loop over tokens, in their SASS for an H200.

    PYTHONPATH=tests/kernels python kernels/benchmarks/lattice_issue.py --out lattice_issue_sm90.json

The script needs no GPU; it compiles with `compile_only.py` and `sass.py` of tests/kernels. A scheduler issues at most
one instruction per cycle, so this count and the time per token (lattice_profile.py) give the share of the time in
which instructions are issued. The count is an upper bound: it also includes the instructions of a loop that run only
at every 16th or 64th token.
"""

import argparse
import json
import re
from pathlib import Path

import compile_only
import sass
import torch
import triton

# tokens per iteration of each loop of a kernel, in the order of the loops' last instructions; a loop with None is not
# counted, because it recomputes states and rarely runs
TOKENS = {
    "lattice_fwd_kernel": (4,),
    "lattice_adjoint_kernel": (4, 2, 32),
    "lattice_walk_kernel": (16,),
    "lattice_walk_adjoint_kernel": (None, 8),
}


def loops(code: list[sass.Instruction]) -> list[int]:
    """The number of instructions of each loop without those of its inner loops, ordered by the loops' last
    instructions.
    """
    where = {instruction.address: i for i, instruction in enumerate(code)}
    spans = []
    for last, instruction in enumerate(code):
        target = re.search(r"0x([0-9a-f]+)", instruction.text) if instruction.family == "BRA" else None
        if target and int(target[1], 16) < instruction.address:
            spans.append((where[int(target[1], 16)], last))
    inside = [[other for other in spans if first < other[0] and other[1] < last] for first, last in spans]
    return [
        last - first + 1 - sum(b - a + 1 for a, b in others)
        for (first, last), others in zip(spans, inside, strict=True)
    ]


def compiled(variant: str) -> dict:
    """The kernels of one forward and backward. The shape is that of lattice_benches.py, with fewer tokens."""
    from hf_memmix_kernels import chunk_lattice

    tokens = torch.zeros(8, 128, 12, 64, dtype=torch.bfloat16)
    inputs = [tokens.clone().requires_grad_() for _ in range(3)] + [torch.zeros(8, 128, 12).requires_grad_()]
    o, _ = chunk_lattice(*inputs, variant=variant, initial_state=torch.zeros(8, 12, 64, 64))
    torch.autograd.grad(o, inputs, torch.zeros_like(o))
    return {kernel.name: kernel for kernel in kernels.take()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    kernels, cuobjdump = compile_only.Kernels(), str(compile_only.TOOLS / "cuobjdump")
    kernels.install()
    rows = []
    for variant in ("dec", "enc", "sim"):
        for name, kernel in compiled(variant).items():
            row = {"variant": variant, "kernel": name, "warps": kernel.metadata.num_warps}
            used = sass.resources(kernel.asm["cubin"], cuobjdump)
            row |= {"registers": used["reg"], "spilled_bytes": used["local"] + used["stack"]}
            if name in TOKENS:
                counts = loops(sass.parse(sass.disassemble(kernel.asm["cubin"], cuobjdump)))
                pairs = zip(counts, TOKENS[name], strict=True)
                row["instructions_per_token"] = round(sum(n / tokens for n, tokens in pairs if tokens), 1)
            rows.append(row)
            print(row, flush=True)
    args.out.write_text(json.dumps({"triton": triton.__version__, "rows": rows}, indent=1) + "\n")
