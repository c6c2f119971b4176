"""Times COFFEE's methods for a sequence (scan, DEER and multiple shooting) over a grid of sizes, on one GPU.

    PYTHONPATH=kernels/torch-ext python kernels/benchmarks/coffee_dispatch.py \
        --out kernels/benchmarks/results/coffee_dispatch_h200.json

The calls are forward passes without autograd. Inputs are random as in benchmark.py: u, w, C ~ N(0, 1), lambda ~ U(-1,
0); the number of iterations of DEER and shooting depends on them. A row is one size and one method. `ms` is the median
of at least 3 calls after one that compiles, with the L2 cache flushed before each call; where it is null, `note` has
the reason. Calls above 100 ms are not timed, and neither are longer inputs of the same width and method. The rule
`coffee_method` was derived from this grid, and tests/kernels/test_coffee_dispatch.py tests it against the grid.
"""

import argparse
import json
import statistics
import time
import warnings
from pathlib import Path

import torch
import triton
from benchmark import commit, draw_coffee
from torch import Tensor

import hf_memmix_kernels as K
from hf_memmix_kernels.coffee import op as coffee_op

METHODS = ("scan", "deer", "shooting")
TOKENS = [4**k for k in range(5, 11)]
# B, D, n: few values of D, because each needs compiled kernels; B * D * n from 128, the paper's small shape, to a
# million
WIDTHS = [(1, 16, 8), (1, 64, 16), (4, 64, 16), *((B, 1024, 16) for B in (1, 4, 16, 64))]
MAX_MS = 100.0
BUDGET_MS = 100.0  # total time of the timed calls of a row, but at least 3 calls
MAX_BYTES = 100e9


def needed_bytes(method: str, B: int, T: int, D: int, n: int) -> float:
    """Bytes that a call needs at the same time: u and y in bfloat16, and for DEER the states after every token and the
    copy of them that is multiplied by C.
    """
    return B * T * D * (4 + (2 * 4 * n if method == "deer" else 0))


def timed(method: str, inputs: dict[str, Tensor], flush: Tensor) -> tuple[float | None, str | None]:
    """Median milliseconds of `chunk_coffee` with one method and None, or None and the reason why it was not timed."""
    coffee_op._warn_not_converged.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        try:
            K.chunk_coffee(**inputs, method=method)  # compiles
            torch.cuda.synchronize()
            start = time.perf_counter()
            K.chunk_coffee(**inputs, method=method)
            torch.cuda.synchronize()
        except UserWarning:
            return None, "its iterations do not converge"
        except torch.cuda.OutOfMemoryError:
            return None, "out of memory"
    once = 1e3 * (time.perf_counter() - start)
    if once > MAX_MS:
        return None, f"a call takes more than {MAX_MS:g} ms"
    times = []
    for _ in range(max(3, min(20, int(BUDGET_MS / once)))):
        flush.zero_()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        K.chunk_coffee(**inputs, method=method)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return round(statistics.median(times), 4), None


@torch.no_grad()
def measure(width: tuple[int, int, int], flush: Tensor) -> list[dict]:
    """The rows of every length and method at one width."""
    B, D, n = width
    rows, slow = [], {}
    for T in TOKENS:
        inputs = None
        for method in METHODS:
            ms, note = None, slow.get(method)
            if note is None and needed_bytes(method, B, T, D, n) > MAX_BYTES:
                note = f"needs more than {MAX_BYTES / 1e9:g} GB"
            if note is None:
                inputs = draw_coffee(B, T, D, n) if inputs is None else inputs
                ms, note = timed(method, inputs, flush)
                if note is not None and "more than" in note:
                    slow[method] = note + f" at {T} tokens already"
            rows.append({"B": B, "T": T, "D": D, "n": n, "method": method, "ms": ms, "note": note})
            print(*rows[-1].values(), flush=True)
        del inputs
        torch.cuda.empty_cache()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file to write; without it the rows are only printed")
    parser.add_argument("--commit", default=commit(), help="commit to record; needed where there is no git checkout")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("the benchmark needs an NVIDIA GPU, but torch finds none")
    torch.manual_seed(0)
    flush = torch.empty(2**28, dtype=torch.int8, device="cuda")
    found = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": args.commit,
        "dtype": "bfloat16",
        "rows": [row for width in WIDTHS for row in measure(width, flush)],
    }
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
