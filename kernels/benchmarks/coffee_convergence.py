"""How many iterations COFFEE's multiple shooting needs over random draws: what bounds `coffee_method` beside time.

    PYTHONPATH=kernels/torch-ext python kernels/benchmarks/coffee_convergence.py \
        --out kernels/benchmarks/results/coffee_convergence.json

The iteration of `coffee_chunk_kernel` in float32 torch on the CPU, with its chunks, tolerance and rules for giving up;
no times. Inputs are as benchmark.py draws them, u and w times `scale`: u, w ~ scale N(0, 1), lambda ~ U(-1, 0).
A row counts `draws`, those that `converged` and those `given_up` early, and has the median `iterations` of the former.
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

# tokens, features, states of a feature, scale, draws
CELLS = (
    *((SHOOTING_TOKENS, D, 8, 1.0, 40) for D in (4, 16, 32, 64, 128)),
    *((T, 16, 8, 1.0, 40) for T in (16384, 262144)),
    *((SHOOTING_TOKENS, 16, 8, scale, 40) for scale in (1.5, 3.0)),
)
LANES = 32  # of a program


def walk(u: Tensor, lam: Tensor, w: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Ends of the chunks u [chunks, length, D] from the states x [chunks, D, n], and their slopes by x."""
    slope = torch.ones_like(x)
    for u_k in u.unbind(1):
        s, v = torch.sigmoid(w * x), lam * x + u_k[..., None]
        slope = slope * (1 + lam * s + w * (s - s * s) * v)
        x = x + s * v
    return x, slope


def iterations(u: Tensor, lam: Tensor, w: Tensor) -> tuple[int, bool]:
    """After how many the states between chunks of u [T, D] stood, or it was given up; and whether they stood."""
    T, D = u.shape
    chunks = u.view(-1, shooting_chunk(T), D)
    start = torch.zeros_like(lam)
    entered = entering = start.expand(len(chunks), *lam.shape)
    for iteration in range(MAX_ITERATIONS + 1):
        ends, slope = walk(chunks, lam, w, entering)
        moved = (entering - entered).abs() / (1 + entering.abs())
        gentle = slope.abs() <= STEEP.value
        change = moved * torch.where(gentle, slope.abs().clamp(min=1), slope.abs() * SLOPELESS.value)
        # what is not finite has not settled
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
    parser.add_argument("--out", type=Path, help="JSON to write; printed only without it")
    args = parser.parse_args()
    found = {"torch": torch.__version__, "commit": commit(), "max_iterations": MAX_ITERATIONS, "patience": PATIENCE}
    found["rows"] = [measure(*cell) for cell in CELLS]
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
