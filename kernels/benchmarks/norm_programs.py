"""Times the backward pass of `gated_norm` by the number of tiles that one program sums, on one GPU.

    PYTHONPATH=kernels/torch-ext python kernels/benchmarks/norm_programs.py --commit COMMIT \
        --out kernels/benchmarks/results/norm_programs_h200.json

A row has the milliseconds of one call, in a captured CUDA graph, with 16 tiles per program and with as many as the
launch chooses, each measured twice in turns.
"""

import torch
from profiling import arguments_and_rows, write_rows
from triton.testing import do_bench_cudagraph

from hf_memmix_kernels.rowwise import launch

# rows, channels, dtype, gate: models of a million parameters, of 20 to 90 million, and of a billion; the norm per head
SHAPES = [
    (32448, 128, torch.float32, False),
    (32448, 256, torch.bfloat16, True),
    (61860, 128, torch.float32, False),
    (32768, 256, torch.float32, False),
    (16384, 1024, torch.float32, False),
    (16384, 2048, torch.bfloat16, False),
    (16384, 2048, torch.bfloat16, True),
    (131072, 64, torch.bfloat16, True),
]


def measured(rows: int, channels: int, dtype: torch.dtype, gated: bool) -> dict:
    y, do = (torch.randn(rows, channels, device="cuda", dtype=dtype) for _ in range(2))
    gate = torch.randn_like(y) if gated else None
    weight = 1 + 0.2 * torch.randn(channels, device="cuda")
    options = (1e-6, "silu" if gated else None, True, None, None)
    chosen = launch._loops
    tiles = -(-rows // launch._rows_per_program(channels))
    row = {"rows": rows, "channels": channels, "dtype": str(dtype).removeprefix("torch."), "gate": gated}
    row |= {"tiles": tiles, "tiles_per_program": chosen(tiles), "ms_16_tiles": [], "ms": []}
    for _ in range(2):
        for name, loops in (("ms_16_tiles", lambda _: 16), ("ms", chosen)):
            launch._loops = loops
            call = do_bench_cudagraph(lambda: launch.gated_norm_bwd_triton(do, y, gate, weight, *options))
            row[name].append(round(call, 4))
    launch._loops = chosen
    return row


def main() -> None:
    args, rows = arguments_and_rows(__doc__)
    about = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "commit": args.commit}
    for shape in SHAPES:
        rows.append(measured(*shape) | about)
        print(rows[-1], flush=True)
        write_rows(args.out, rows)


if __name__ == "__main__":
    main()
