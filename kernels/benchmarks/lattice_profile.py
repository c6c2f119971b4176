"""Milliseconds of every Lattice kernel in one forward and backward of each variant, on one GPU.

    python kernels/benchmarks/lattice_profile.py --out kernels/benchmarks/results/lattice_profile_h200.json

The shape is B=8, T=4096, 12 heads of 64 channels and slots in bf16. `ns_per_token` is given for the kernels that loop
over tokens. Their programs, one or more per (sequence, head), all run at the same time, so it is the time of one token
in a program. Rows of --out from other commits are kept; lattice/README.md refers to them.
"""

import torch
from lattice_benches import SHAPES, draw, state
from profiling import arguments_and_rows, kernel_ms, write_rows

from hf_memmix_kernels import chunk_lattice

SEQUENTIAL = (
    "lattice_fwd_kernel", "lattice_adjoint_kernel", "lattice_walk_kernel", "lattice_walk_adjoint_kernel",
    "lattice_dec_walk_back",
)  # fmt: skip


def profile(variant: str, backward: bool) -> dict[str, float]:
    """The milliseconds of each kernel of one pass, by its name."""
    B, T, H, D = SHAPES[0]
    torch.manual_seed(0)
    inputs = {name: x.requires_grad_(backward) for name, x in draw(B, T, H, D).items()}
    (start,) = state(B, H, D)
    do = torch.randn_like(inputs["v"])

    def call():
        o, _ = chunk_lattice(**inputs, variant=variant, initial_state=start)
        if backward:
            torch.autograd.grad(o, list(inputs.values()), do)

    return kernel_ms(call, "lattice")


def main():
    args, rows = arguments_and_rows(__doc__)
    T = SHAPES[0][1]
    for variant in ("dec", "enc", "sim"):
        for backward in (False, True):
            ms = profile(variant, backward)
            walks = {name: round(1e6 * ms[name] / T, 1) for name in SEQUENTIAL if name in ms}
            row = {"commit": args.commit, "gpu": torch.cuda.get_device_name(), "variant": variant}
            row |= {"pass": "fwd+bwd" if backward else "fwd", "ms": ms, "ns_per_token": walks}
            rows.append(row)
            print(row, flush=True)
    write_rows(args.out, rows)


if __name__ == "__main__":
    main()
