"""How many iterations does COFFEE's multiple shooting need? `coffee_method` also depends on these counts.

    PYTHONPATH=kernels/torch-ext python kernels/benchmarks/coffee_convergence.py \
        --out kernels/benchmarks/results/coffee_convergence.json

The script runs the iteration of `coffee_chunk_kernel` in float32 torch on the CPU, with the kernel's chunks, tolerance
and rules for stopping early. It measures no times. Inputs are random as in benchmark.py, with u and w times `scale`:
u, w ~ scale N(0, 1), lambda ~ U(-1, 0). A row has the number of `draws`, the number of them that `converged` and that
were `given_up` early, and the median `iterations` of those that converged.
"""

import argparse
import json
import statistics
from pathlib import Path

import torch
from benchmark import commit
from torch import Tensor

from hf_memmix_kernels.coffee.kernels.shooting import SLOPELESS, STEEP
from hf_memmix_kernels.coffee.launch_shooting import CHECK_EVERY, MAX_ITERATIONS, PATIENCE, UNSETTLED
from hf_memmix_kernels.coffee.op import TOLERANCE
from hf_memmix_kernels.coffee.sizes import SHOOTING_TOKENS, shooting_chunk

# tokens, features, states per feature, scale, draws
CELLS = (
    *((SHOOTING_TOKENS, D, 8, 1.0, 40) for D in (4, 16, 32, 64, 128)),
    *((T, 16, 8, 1.0, 40) for T in (16384, 262144)),
    *((SHOOTING_TOKENS, 16, 8, scale, 40) for scale in (1.5, 3.0)),
)
LANES = 32  # states that one program of the kernel computes


def walk(u: Tensor, lam: Tensor, w: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """The states after the chunks u [chunks, length, D] that begin with the states x [chunks, D, n], and the
    derivatives of these states by x.
    """
    slope = torch.ones_like(x)
    for u_k in u.unbind(1):
        s, v = torch.sigmoid(w * x), lam * x + u_k[..., None]
        slope = slope * (1 + lam * s + w * (s - s * s) * v)
        x = x + s * v
    return x, slope


def iterations(u: Tensor, lam: Tensor, w: Tensor) -> tuple[int, bool]:
    """The number of iterations until the states between the chunks of u [T, D] converge, or until the iteration stops
    early; and whether they converged.
    """
    T, D = u.shape
    chunks = u.view(-1, shooting_chunk(T), D)
    start = torch.zeros_like(lam)
    entered = entering = start.expand(len(chunks), *lam.shape)
    for iteration in range(MAX_ITERATIONS + 1):
        ends, slope = walk(chunks, lam, w, entering)
        moved = (entering - entered).abs() / (1 + entering.abs())
        gentle = slope.abs() <= STEEP.value
        change = moved * torch.where(gentle, slope.abs().clamp(min=1), slope.abs() * SLOPELESS.value)
        # a comparison with a value that is not finite is False, so such a state counts as not converged
        settled = (moved == 0) | (change <= TOLERANCE[u.dtype])
        after, x = [], start
        for end, by, old, use in zip(ends, slope, entering, gentle, strict=True):
            after.append(x)
            x = end + torch.where(use, by, 0) * (x - old)
        entered, entering = entering, torch.stack(after)
        if iteration and iteration % CHECK_EVERY == 0:
            programs = settled.view(len(chunks), -1, min(LANES, lam.numel())).all(-1)
            unsettled = 1 - programs.float().mean().item()
            if unsettled == 0:
                return iteration, True
            if iteration >= PATIENCE and unsettled > UNSETTLED:
                break
    return iteration, False


@torch.no_grad()
def measure(T: int, D: int, n: int, scale: float, draws: int) -> dict:
    found = []
    for seed in range(draws):
        draw = torch.Generator().manual_seed(seed)
        u = (scale * torch.randn(T, D, generator=draw)).bfloat16().float()
        lam = -torch.rand(D, n, generator=draw)
        found.append(iterations(u, lam, scale * torch.randn(D, n, generator=draw)))
    needed = [count for count, converged in found if converged]
    early = sum(not converged and count < MAX_ITERATIONS for count, converged in found)
    row = {"T": T, "D": D, "n": n, "scale": scale, "draws": draws, "converged": len(needed), "given_up": early}
    row["iterations"] = statistics.median(needed) if needed else None
    print(row, flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file to write; without it the rows are only printed")
    args = parser.parse_args()
    found = {"torch": torch.__version__, "commit": commit(), "max_iterations": MAX_ITERATIONS, "patience": PATIENCE}
    found["rows"] = [measure(*cell) for cell in CELLS]
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
