"""COFFEE's ways through a sequence, scan, DEER and multiple shooting, over a grid of sizes on one GPU.

    PYTHONPATH=kernels/torch-ext python kernels/benchmarks/coffee_dispatch.py \
        --out kernels/benchmarks/results/coffee_dispatch_h200.json

Forward passes without autograd, of inputs as benchmark.py draws them: u, w, C ~ N(0, 1), lambda ~ U(-1, 0). How many
iterations DEER and shooting need depends on these. A row is one size and method: `ms`, the median of 3 calls or more
after one to compile, with the L2 cache flushed before each; or null and a `note` that says why. Calls above 100 ms are
not timed, nor longer inputs of the same width and method. The rule `coffee_method` is drawn from this grid, and
tests/kernels/test_coffee_dispatch.py holds it to that.
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
# B, D, n: few values of D, for which kernels are compiled; B * D * n from 128, the published small shape, to a million
WIDTHS = [(1, 16, 8), (1, 64, 16), (4, 64, 16), *((B, 1024, 16) for B in (1, 4, 16, 64))]
MAX_MS = 100.0
BUDGET_MS = 100.0  # of the timed calls of a row, at least 3
MAX_BYTES = 100e9


def needed_bytes(method: str, B: int, T: int, D: int, n: int) -> float:
    """What a call holds at once: u and y in bfloat16; DEER's states after every token, again while C reads them."""
    return B * T * D * (4 + (2 * 4 * n if method == "deer" else 0))


def timed(method: str, inputs: dict[str, Tensor], flush: Tensor) -> tuple[float | None, str | None]:
    """Median milliseconds of `chunk_coffee` by one method, or why there are none."""
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
    """Rows of every length and method at one width."""
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
    parser.add_argument("--out", type=Path, help="JSON to write; printed only without it")
    parser.add_argument("--commit", default=commit(), help="for machines that hold no git checkout")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("the benchmark needs an NVIDIA GPU, torch sees none")
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
