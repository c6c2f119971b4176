"""Measures time and memory of every op, and of torch's attention in the same run, on one GPU.

    PYTHONPATH=kernels/torch-ext python kernels/benchmarks/benchmark.py --out kernels/benchmarks/results/h200.json

The measured calls are operators without projections. "fwd" runs without autograd; "fwd+bwd" is torch.autograd.grad
with respect to every input. Both are medians of triton.testing.do_bench, which flushes the L2 cache. "decode" is one
step that Python calls, with the launch overhead; "decode_graph" is one step of a captured CUDA graph that uses several
states in turn, which together are larger than the L2 cache. `peak_mib` is the memory allocated in addition to the
inputs; `kernel_ms` is the sum of the times of all GPU kernels of a pass, without the host. A pass that another
library's op refuses to run has null for all, and the reason as `note`. Rows of --out that describe the same
measurement are replaced; all other rows are kept. To measure a new op, add one row to BENCHES.
"""

import argparse
import json
import os
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
import triton
from lattice_benches import BENCHES as LATTICE
from ska_benches import BENCHES as SKA
from torch import Tensor

import hf_memmix_kernels as K

CHUNK_SHAPES = [(4, 8192, 8, 128), (4, 32768, 8, 128)]
WINDOW_SHAPES = [(4, 8192, 16, 64), (4, 8192, 16, 128)]
DECODE_SHAPES = [(1, 1, 32, 128), (8, 1, 32, 128), (64, 1, 32, 128)]
MEASURED = ("ms", "kernel_ms", "peak_mib", "note", "gpu", "torch", "triton", "commit")
L2_BYTES = 60e6


@dataclass(frozen=True)
class Bench:
    """One op: `draw(B, T, H, D)` returns its inputs, `forward(inputs)` its output tensors, `step` runs one decode
    step.
    """

    op: str
    draw: Callable[[int, int, int, int], dict[str, Tensor]]
    forward: Callable[[dict[str, Tensor]], tuple[Tensor, ...]]
    state: Callable[[int, int, int], tuple[Tensor, ...]] | None = None
    step: Callable[[dict[str, Tensor], tuple[Tensor, ...]], Tensor] | None = None
    fields: dict = field(default_factory=dict)
    chunk_shapes: list[tuple[int, int, int, int]] = field(default_factory=lambda: CHUNK_SHAPES)
    decode_shapes: list[tuple[int, int, int, int]] = field(default_factory=lambda: DECODE_SHAPES)
    # for an op of another library: the start of the RuntimeError text with which it refuses a pass
    refusal: str | None = None


def randn(*size: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*size, device="cuda", dtype=dtype)


def draw_attention(B: int, T: int, H: int, D: int) -> dict[str, Tensor]:
    return {name: randn(B, H, T, D) for name in "qkv"}


def draw_gla(B: int, T: int, H: int, D: int) -> dict[str, Tensor]:
    q, k = (F.normalize(randn(B, T, H, D), dim=-1) for _ in range(2))
    return {"q": q, "k": k, "v": randn(B, T, H, D), "log_decay": -0.1 * torch.rand(B, T, H, device="cuda")}


def draw_delta(channels: bool) -> Callable[[int, int, int, int], dict[str, Tensor]]:
    """Log decays and write strengths of the gated delta rule: one decay per head, or per key channel."""

    def draw(B: int, T: int, H: int, D: int) -> dict[str, Tensor]:
        size = (B, T, H, D) if channels else (B, T, H)
        gates = {"log_decay": -0.02 * torch.rand(size, device="cuda"), "beta": torch.rand(B, T, H, device="cuda")}
        return {**draw_gla(B, T, H, D), **gates}

    return draw


def draw_gka(B: int, T: int, H: int, D: int) -> dict[str, Tensor]:
    gates = {name: torch.rand(B, T, H, device="cuda") for name in ("alpha", "beta")}
    return {**draw_gla(B, T, H, D), **gates}


def draw_conv(B: int, T: int, H: int, D: int) -> dict[str, Tensor]:
    return {"x": randn(B, T, H * D), "weight": randn(H * D, 4)}


def draw_coffee(B: int, T: int, D: int, n: int) -> dict[str, Tensor]:
    parameters = {"lam": -torch.rand(D, n, device="cuda")}
    parameters |= {name: randn(D, n, dtype=torch.float32) for name in ("w", "C")}
    return {"u": randn(B, T, D), **parameters}


def gka_state(B: int, H: int, D: int) -> tuple[Tensor, ...]:
    keys, values = (randn(B, H, 2 * D, D, dtype=torch.float32) / D**0.5 for _ in range(2))
    return keys.mT @ keys, values.mT @ keys


def flat(outputs) -> tuple[Tensor, ...]:
    """Turn (o, state) or (o, (state, ...)) into one tuple of all tensors."""
    o, state = outputs
    return (o, *state) if isinstance(state, tuple) else (o, state)


def gka(more_chunks: tuple = (), more_decode: tuple = (), **options) -> Bench:
    """GKA with a schedule of its solver, at the common shapes and more."""
    iterations = options.get("refinement", options.get("num_iterations"))
    return Bench(
        "gka",
        draw_gka,
        lambda x: flat(K.chunk_gka(**x, **options)),
        gka_state,
        lambda x, state: K.gka_step(**x, state=state, **options),
        fields={"iterations": list(iterations) if isinstance(iterations, tuple) else iterations},
        chunk_shapes=[*CHUNK_SHAPES, *more_chunks],
        decode_shapes=[*DECODE_SHAPES, *more_decode],
    )


def window(size: int, sinks: int) -> Bench:
    """A window of `size` tokens. Its step is timed in whole models."""
    return Bench(
        "window",
        lambda B, T, H, D: {name: randn(B, T, H, D) for name in "qkv"},
        lambda x: K.chunk_window(**x, window=size, sinks=sinks, final_state=False)[:1],
        fields={"window": size, "sinks": sinks},
        chunk_shapes=WINDOW_SHAPES,
    )


def gka_sketch(D: int, size: int | None) -> Bench:
    """GKA of head size D with the layer's schedule and its states in `size` dimensions; None is without a sketch."""
    s = size or D

    def draw(B, T, H, D):
        inputs = draw_gka(B, T, H, D)
        if size is not None:
            inputs["sketch"] = torch.linalg.qr(randn(H, D, size, dtype=torch.float32)).Q.bfloat16()
        return inputs

    def state(B, H, D):
        keys, values = (randn(B, H, 2 * D, width, dtype=torch.float32) / D**0.5 for width in (s, D))
        return keys.mT @ keys, values.mT @ keys  # [s, s] and [D, s]

    return Bench(
        "gka_sketch",
        draw,
        lambda x: flat(K.chunk_gka(**x, refinement=(12, 10))),
        state,
        lambda x, state: K.gka_step(**x, state=state, refinement=(12, 10)),
        fields={
            "iterations": [12, 10],
            "sketch": size or D,
            "state_bytes_per_head": 4 * (size or D) * (D + (size or D)),
        },
        chunk_shapes=[(4, 8192, 8, D)],
        decode_shapes=[(B, 1, 32, D) for B in (1, 8, 64)],
    )


BENCHES = [
    Bench(
        "sdpa",
        draw_attention,
        lambda x: (F.scaled_dot_product_attention(*x.values(), is_causal=True),),
        chunk_shapes=[*CHUNK_SHAPES, *WINDOW_SHAPES],
    ),
    *(window(size, sinks) for size in (512, 384) for sinks in (0, 1)),
    Bench(
        "short_conv",
        draw_conv,
        lambda x: flat(K.short_conv(**x)),
        lambda B, H, D: (randn(B, H * D, 3),),
        lambda x, state: K.short_conv_step(**x, bias=None, state=state[0]),
        fields={"taps": 4},
    ),
    Bench(
        "gla",
        draw_gla,
        lambda x: flat(K.chunk_gla(**x)),
        lambda B, H, D: (randn(B, H, D, D, dtype=torch.float32),),
        lambda x, state: K.gla_step(**x, state=state[0]),
    ),
    *(
        Bench(
            "gated_delta",
            draw_delta(decays == "channel"),
            lambda x: flat(K.chunk_gated_delta(**x)),
            lambda B, H, D: (randn(B, H, D, D, dtype=torch.float32),),
            lambda x, state: K.gated_delta_step(**x, state=state[0]),
            fields={"decay_per": decays},
        )
        for decays in ("head", "channel")
    ),
    # in rows of COFFEE, H is the number of features and D the number of states per feature
    Bench(
        "coffee",
        draw_coffee,
        lambda x: flat(K.chunk_coffee(**x)),
        lambda B, D, n: (randn(B, D, n, dtype=torch.float32),),
        lambda x, state: K.coffee_step(**x, state=state[0]),
        chunk_shapes=[(8, 4096, 1536, 16), (8, 4096, 768, 2), (1, 65536, 16, 8)],
        decode_shapes=[(1, 1, 1536, 16), (8, 1, 1536, 16), (64, 1, 1536, 16)],
    ),
    gka(num_iterations=30),
    gka(refinement=(10, 10, 10)),
    # the default schedule of the layer, also for one long sequence and at the largest head size
    gka(
        more_chunks=((1, 131072, 8, 128), (4, 8192, 4, 256)),
        more_decode=((8, 1, 16, 256), (64, 1, 16, 256)),
        refinement=(12, 10),
    ),
    *(gka_sketch(128, size) for size in (None, 64, 32)),
    *(Bench(**row) for row in (*LATTICE, *SKA)),
]


def measure_peak(fn: Callable) -> float:
    """The peak of allocated memory during `fn`, in MiB above the memory that is allocated before it."""
    fn()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    fn()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def measure_kernels(fn: Callable) -> float:
    """Milliseconds of all GPU kernels of one call, the mean of three."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(3):
            fn()
        torch.cuda.synchronize()
    return sum(event.self_device_time_total for event in profiler.key_averages()) / 3e3


def time_chunks(bench: Bench, shape: tuple) -> list[dict]:
    inputs = {name: t.requires_grad_() for name, t in bench.draw(*shape).items()}

    def forward():
        with torch.no_grad():
            return bench.forward(inputs)

    weights = [torch.randn_like(t) for t in forward()[:1]]

    def both():
        return torch.autograd.grad(bench.forward(inputs)[:1], list(inputs.values()), weights)

    rows = []
    for name, fn in (("fwd", forward), ("fwd+bwd", both)):
        try:
            ms = triton.testing.do_bench(fn, warmup=50, rep=200, return_mode="median")
        except RuntimeError as refused:
            if bench.refusal is None or not str(refused).startswith(bench.refusal):
                raise
            rows.append({"pass": name, "ms": None, "peak_mib": None, "note": str(refused)})
            continue
        found = {
            "ms": round(ms, 4),
            "kernel_ms": round(measure_kernels(fn), 4),
            "peak_mib": round(measure_peak(fn), 1),
        }
        rows.append({"pass": name, **found})
    return rows


def time_decode(bench: Bench, shape: tuple, steps: int = 16) -> list[dict]:
    B, _, H, D = shape
    inputs = bench.draw(*shape)
    size = sum(t.nbytes for t in bench.state(1, H, D)) * B
    states = [bench.state(B, H, D) for _ in range(min(steps, 1 + int(2 * L2_BYTES / size)))]

    def run():
        for i in range(steps):
            bench.step(inputs, states[i % len(states)])

    run()
    torch.cuda.synchronize()
    eager = []
    for _ in range(20):
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        eager.append(1e3 * (time.perf_counter() - start) / steps)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    replays = []
    for _ in range(40):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        replays.append(start.elapsed_time(end) / steps)
    peak = round(measure_peak(lambda: bench.step(inputs, states[0])), 1)
    return [
        {"pass": "decode", "ms": round(statistics.median(eager), 4), "peak_mib": peak},
        {"pass": "decode_graph", "ms": round(statistics.median(replays), 4), "peak_mib": peak},
    ]


def commit() -> str | None:
    """The commit of the checkout; None outside a git checkout."""
    result = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True)
    return result.stdout.strip() or None


def merge(path: Path, rows: list[dict], measured: tuple[str, ...] = ()) -> list[dict]:
    """The rows of the file; `rows` replaces those that describe the same measurement, and adds the new ones.

    measured: columns that hold results, besides `MEASURED`; all other columns describe the measurement.
    """
    results = {*MEASURED, *measured}

    def key(row):
        return json.dumps({name: value for name, value in row.items() if name not in results}, sort_keys=True)

    kept = {key(row): row for row in (json.loads(path.read_text()) if path.exists() else [])}
    return list({**kept, **{key(row): row for row in rows}}.values())


def write_merged(path: Path, rows: list[dict], measured: tuple[str, ...] = ()) -> None:
    """Write what `merge` gives to the file, whole or not at all. A missing folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_text(json.dumps(merge(path, rows, measured), indent=1) + "\n")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def main() -> None:
    names = list(dict.fromkeys(bench.op for bench in BENCHES))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", nargs="+", choices=names, default=names)
    parser.add_argument(
        "--out", type=Path, help="JSON file to which the rows are written; without it they are only printed"
    )
    parser.add_argument("--commit", default=commit(), help="commit to record; needed where there is no git checkout")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("the benchmark needs an NVIDIA GPU, but torch finds none")
    torch.manual_seed(0)
    machine = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": args.commit,
    }
    rows = []
    for bench in (bench for bench in BENCHES if bench.op in args.ops):
        jobs = [(time_chunks, shape) for shape in bench.chunk_shapes]
        jobs += [(time_decode, shape) for shape in bench.decode_shapes] if bench.step else []
        for job, shape in jobs:
            sizes = dict(zip("BTHD", shape, strict=True))
            for result in job(bench, shape):
                row = {"op": bench.op, **sizes, "dtype": "bfloat16", **bench.fields, **result, **machine}
                rows.append(row)
                shown = " ".join(f"{name}={value}" for name, value in row.items() if name not in machine)
                print(shown, flush=True)
            torch.cuda.empty_cache()
            if args.out:
                write_merged(args.out, rows)


if __name__ == "__main__":
    main()
