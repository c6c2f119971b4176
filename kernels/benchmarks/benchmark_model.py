"""Measures whole models on one GPU: a Llama of 1.04 billion parameters, and the same Llama with a mixer in every
layer.

    python kernels/benchmarks/benchmark_model.py --out kernels/benchmarks/results/model_h200.json

Weights (bf16) and tokens are random. "decode" is `generate()` with a static cache after a prompt of 1024 tokens; its
time includes everything that `generate()` does between two tokens. "prefill" is one forward that fills a dynamic cache
and computes the last logits. "graph" is the same as a CUDA graph, without the host time of Python: by
`hf_memmix.PromptGraph`, for attention by a graph of the forward itself; its rows have the phase "prefill" and
`cuda_graph`. "train" is forward, backward and one fused AdamW step, without gradient checkpointing.

`ms` is a median. CUDA events measure it; for decode it is the time between two tokens. `kernel_ms` is the sum of the
times of all GPU kernels in one call, as the profiler measures them, and `kernels` the same sum by kind of kernel.
`mfu` is the model FLOP utilisation: 6 FLOP per parameter and token for training, 2 for prefill, divided by 989
TFLOP/s. Rows of --out that describe the same measurement are replaced; all other rows are kept.
"""

import argparse
import json
import statistics
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
import triton
from benchmark import commit, write_merged
from llama import build, measure

import hf_memmix

PEAK_FLOPS = 989e12  # bf16, one H200
BUSY_CYCLES = 10_000_000  # of the GPU: 5 ms, longer than the host needs to launch a graph
DECODE_CONTEXT, NEW_TOKENS = 1024, 32
DECODE_BATCHES = (1, 32, 128)
PREFILL = ((1, 2048), (1, 32768))
TRAIN = ((8, 2048), (2, 8192))
PHASES = ("prefill", "graph", "train", "decode")
MIXERS = ("attention", "gka", "lattice", "mamba2", "ska", "coffee", "window", "window/1", "gka+64", "gka+64/1")
MIXERS += ("gka:32", "gka:16")
MEASURED = ("ms", "tokens_s", "mfu", "peak_mib", "kernel_ms", "kernels", "first_token_s")
# kind: words in the names of its kernels; a kernel has the first kind of which a word appears in its name
KINDS = (
    (
        "mixers",
        ("gka_", "gla_", "lattice_", "coffee_", "ska_", "short_conv_", "unit_heads", "gated_", "decay_", "window_"),
    ),
    ("attention", ("flash", "fmha", "attention")),
    ("matrix products", ("gemm", "nvjet", "cutlass", "cublas", "splitk")),
    ("optimizer", ("multi_tensor", "FusedAdam", "foreach")),
    ("copies and fills", ("Memcpy", "Memset", "copy", "fill", "Cat")),
    ("reductions", ("reduce", "softmax", "Softmax", "norm")),
    ("elementwise", ("elementwise", "triton_poi", "triton_per", "triton_red", "vectorized")),
)


def kind_of(kernel: str) -> str:
    """The kind of a kernel by its name, see `KINDS`; "other" if no word appears in it."""
    return next((kind for kind, words in KINDS if any(word in kernel for word in words)), "other")


def kernel_times(call: Callable[[], object]) -> tuple[float, dict[str, float], list]:
    """Milliseconds of all kernels of one call, by kind of kernel, and by kernel as [name, calls, ms],
    longest first.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    kinds, rows = Counter(), []
    for event in profiler.key_averages():
        ms = event.self_device_time_total / 1e3
        if ms > 0:
            kinds[kind_of(event.key)] += ms
            rows.append([event.key[:90], event.count, round(ms, 3)])
    rows.sort(key=lambda row: -row[2])
    return sum(kinds.values()), {kind: round(ms, 3) for kind, ms in kinds.most_common()}, rows


def between_events(call: Callable[[], object], behind: bool = False) -> float:
    """Milliseconds between two CUDA events around a call. With `behind`, the GPU is busy with other work when the host
    makes the call, so the time is the GPU's alone.
    """
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    if behind:
        torch.cuda.synchronize()
        torch.cuda._sleep(BUSY_CYCLES)
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def median_ms(call: Callable[[], object], repeats: int, behind: bool = False) -> float:
    """Median of `between_events`, after two calls that are not timed."""
    call()
    call()
    return statistics.median(between_events(call, behind) for _ in range(repeats))


def random_tokens(model, batch: int, length: int) -> torch.Tensor:
    return torch.randint(3, model.config.vocab_size, (batch, length), device="cuda")


def decode(model, batch: int) -> dict:
    torch._dynamo.reset()
    found = measure(model, batch, DECODE_CONTEXT, NEW_TOKENS, "static")
    return {
        "ms": found["ms"],
        "tokens_s": round(1e3 * batch / found["ms"]),
        "peak_mib": found["peak_mib"],
        "first_token_s": found["first_token_s"],
    }


def throughput(call, tokens: int, flops: float, repeats: int) -> tuple[dict, list]:
    """The measured columns of a call that reads `tokens` tokens with `flops` FLOP per token, and its
    kernels by time.
    """
    torch.cuda.reset_peak_memory_stats()
    ms = median_ms(call, repeats)
    peak = torch.cuda.max_memory_allocated() / 2**20
    kernel_ms, kinds, longest = kernel_times(call)
    row = {
        "ms": round(ms, 2),
        "tokens_s": round(1e3 * tokens / ms),
        "mfu": round(flops * tokens / ms * 1e3 / PEAK_FLOPS, 3),
    }
    return row | {"peak_mib": round(peak), "kernel_ms": round(kernel_ms, 2), "kernels": kinds}, longest


def prefill(model, batch: int, length: int, size: int) -> tuple[dict, list]:
    tokens = random_tokens(model, batch, length)

    @torch.no_grad()
    def call():
        return model(tokens, use_cache=True, logits_to_keep=1)

    return throughput(call, batch * length, 2 * size, 10)


def graphed_prefill(model, batch: int, length: int, size: int) -> tuple[dict, list]:
    tokens = random_tokens(model, batch, length)
    if hasattr(model.config, "mixer_types"):
        graph = hf_memmix.PromptGraph(model, batch, length)
        return throughput(lambda: graph(tokens), batch * length, 2 * size, 10)

    @torch.no_grad()
    def forward():
        return model(tokens, use_cache=True, logits_to_keep=1).logits

    forward()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = forward()
    found = throughput(graph.replay, batch * length, 2 * size, 10)
    del logits
    return found


def train(model, batch: int, length: int, size: int, optimizer) -> tuple[dict, list]:
    tokens = random_tokens(model, batch, length)

    def call():
        model(tokens, labels=tokens, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return throughput(call, batch * length, 6 * size, 5)


def rows_of(mixer: str, phases: list[str], decode_batches: list[int], compiled: bool):
    """One row per measurement, each as soon as it is there; the longest kernels go to the output only.

    `compiled`: prefill and training by `torch.compile(model)`, at the first of their shapes; `generate()` compiles
    decode with a static cache anyway.
    """
    model = build(None if mixer == "attention" else mixer)
    size = sum(p.numel() for p in model.parameters())
    call = torch.compile(model) if compiled else model
    shapes = slice(0, 1) if compiled else slice(None)
    if "prefill" in phases:
        for batch, length in PREFILL[shapes]:
            row, longest = prefill(call, batch, length, size)
            yield {"phase": "prefill", "B": batch, "T": length, "compiled": compiled, **row}, longest
    if "graph" in phases and not compiled:
        batch, length = PREFILL[0]  # at the longer one the GPU does not wait
        row, longest = graphed_prefill(model, batch, length, size)
        yield {"phase": "prefill", "B": batch, "T": length, "compiled": False, "cuda_graph": True, **row}, longest
    if "decode" in phases:
        for batch in decode_batches:
            yield {"phase": "decode", "B": batch, "T": DECODE_CONTEXT, "compiled": True, **decode(model, batch)}, []
    if "train" in phases:
        model.train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
        for batch, length in TRAIN[shapes]:
            row, longest = train(call, batch, length, size, optimizer)
            yield {"phase": "train", "B": batch, "T": length, "compiled": compiled, **row}, longest


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--mixers", nargs="+", choices=MIXERS, default=list(MIXERS))
    parser.add_argument("--phases", nargs="+", choices=PHASES, default=list(PHASES))
    parser.add_argument("--decode-batches", nargs="+", type=int, default=list(DECODE_BATCHES))
    parser.add_argument("--compile", action="store_true", help="prefill and training by torch.compile")
    parser.add_argument("--longest", type=int, default=0, help="print so many of the longest kernels of each row")
    parser.add_argument("--commit", default=commit(), help="for machines that hold no git checkout")
    args = parser.parse_args()
    machine = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    rows = []
    for mixer in args.mixers:
        for row, longest in rows_of(mixer, args.phases, args.decode_batches, args.compile):
            rows.append({"mixer": mixer, **row, **machine, "commit": args.commit})
            print(json.dumps({name: value for name, value in rows[-1].items() if name not in machine}), flush=True)
            for found in longest[: args.longest]:
                print("   ", *found, flush=True)
            write_merged(args.out, rows, MEASURED)
        torch._dynamo.reset()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
