"""How close is Lattice's frozen-state mode to its recurrence? Relative error of the output, in float64 on a CPU.

    python kernels/benchmarks/lattice_frozen.py --out kernels/benchmarks/results/lattice_frozen_cpu.json

q, k and v are random with unit norm, the step size is constant, and the slots start orthonormal; there are 2 sequences
of 512 tokens. The script prints the table in the docstring of `frozen_lattice`.
"""

import argparse
import json
from pathlib import Path

import torch
import torch.nn.functional as F

import hf_memmix_kernels as K

SIZES = {"batch": 2, "tokens": 512, "heads": 1, "slots": 64, "head_dim": 64}
CHUNKS = (4, 16, 64)
STEPS = (0.1, 0.5, 1.0)


def measure(variant: str, gamma: float, seed: int = 0) -> dict:
    """One row: the relative error at each chunk size."""
    generator = torch.Generator().manual_seed(seed)
    B, T, H, m, d = SIZES.values()
    q, k, v = (
        F.normalize(torch.randn(B, T, H, n, generator=generator, dtype=torch.float64), dim=-1) for n in (m, m, d)
    )
    tokens = (q, k, v, torch.full((B, T, H), gamma, dtype=torch.float64))
    start = torch.linalg.qr(torch.randn(B, H, d, m, generator=generator, dtype=torch.float64)).Q
    exact, _ = K.chunk_lattice(*tokens, variant=variant, initial_state=start)
    errors = {}
    for C in CHUNKS:
        y, _ = K.frozen_lattice(*tokens, chunk_size=C, variant=variant, initial_state=start)
        errors[str(C)] = ((y - exact).norm() / exact.norm()).item()
    return {"variant": variant, "gamma": gamma, "error": errors}


def line(row: dict) -> str:
    """A row in the format of the table in the docstring of `frozen_lattice`."""
    errors = (f"{100 * x:<8.2g}" for x in row["error"].values())
    return f"{row['gamma']:<8}{row['variant']:<10}{''.join(errors)}".rstrip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    rows = [measure(variant, gamma) for gamma in STEPS for variant in ("dec", "enc", "sim")]
    args.out.write_text(json.dumps({"torch": torch.__version__, "sizes": SIZES, "rows": rows}, indent=1) + "\n")
    print(f"{'gamma':<8}{'variant':<10}" + "".join(f"C = {C:<4}" for C in CHUNKS))
    for row in rows:
        print(line(row))


if __name__ == "__main__":
    main()
