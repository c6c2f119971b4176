"""Milliseconds of every GKA kernel in one forward and backward, for several launch configurations, on one GPU.

    python kernels/benchmarks/gka_profile.py --out kernels/benchmarks/results/gka_profile_h200.json

The shape is B=4, T=8192, H=8, D=128 in bf16, with refinement (12, 10). The time of a kernel that runs in both passes
is the sum of both. Rows of --out from other commits are kept; the section "Floor, and attempts" of gka/README.md
refers to them.
"""

import torch
from profiling import arguments_and_rows, kernel_ms, write_rows

from hf_memmix_kernels import _tape, chunk_gka
from hf_memmix_kernels.gka import launch

CONFIGURATIONS = [
    (4, 1, 64),
    (4, 2, 64),
    (4, 3, 64),
    (8, 2, 64),
    (4, 2, 32),
]  # warps, stages, scan's columns


def draw() -> list[torch.Tensor]:
    """q, k, v, log-decay, alpha and beta, as leaves that require gradients."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(4, 8192, 8, 128, device="cuda") for _ in range(3))
    q, k = (torch.nn.functional.normalize(t, dim=-1) for t in (q, k))
    gates = torch.rand(3, 4, 8192, 8, device="cuda")
    return [
        t.requires_grad_() for t in (q.bfloat16(), k.bfloat16(), v.bfloat16(), -0.2 * gates[0], gates[1], gates[2])
    ]


def profile(inputs: list[torch.Tensor]) -> dict[str, float]:
    """The milliseconds of each kernel, by its name."""

    def both():
        o, _ = chunk_gka(*inputs, refinement=(12, 10))
        torch.autograd.grad(o, inputs, torch.ones_like(o))

    return kernel_ms(both, "gka")


def main():
    args, rows = arguments_and_rows(__doc__)
    inputs = draw()
    for warps, stages, tile in CONFIGURATIONS:
        _tape.switch.on = False  # a tape would go on with the configuration before
        launch.LAUNCH = dict.fromkeys(launch.LAUNCH, ((warps, stages),) * 3)
        launch.COLUMNS_OF_TILE = tile
        rows.append(
            {"commit": args.commit, "gpu": torch.cuda.get_device_name(), "refinement": [12, 10], "warps": warps}
            | {"stages": stages, "tile": tile, "ms": profile(inputs)}
        )
        print(rows[-1], flush=True)
    write_rows(args.out, rows)


if __name__ == "__main__":
    main()
