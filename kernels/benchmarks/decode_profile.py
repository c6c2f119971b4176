"""Divides the time of one decoded token of `generate()` among host and GPU, on one GPU.

    python kernels/benchmarks/decode_profile.py --out kernels/benchmarks/results/decode_profile_h200.json

The models and the measurement are those of "decode" in `benchmark_model.py`: a static cache after a prompt of 1024
tokens, and a step that `generate()` compiles with CUDA graphs. `ms` is the median time between two tokens without the
profiler. The other columns are medians over tokens under the profiler, which makes the host slower: `kernel_ms` is the
sum of the times of all kernels, `launches` their number, `gaps_ms` the sum of the waits of less than 20 microseconds
between kernels, which are those inside of the CUDA graph, and `guards_ms` what the checks of torch.compile take before
the compiled program runs. `longest` are kernels as [name, number, ms] per token, `host` ranges of the host in the same
form. `graph_ms` is the step without torch.compile as one CUDA graph, without the host. Rows of --out that describe the
same measurement are replaced.
"""

import argparse
import json
import statistics
from collections import Counter
from pathlib import Path

import torch
import triton
from benchmark import commit, write_merged
from benchmark_generate import TokenTimer, build, measure
from benchmark_model import DECODE_CONTEXT, MIXERS, median_ms, random_tokens
from torch.autograd import DeviceType
from transformers import StoppingCriteriaList

from hf_memmix.training.experiments.benchmarks.quantized import step_graph

NEW_TOKENS, PROFILED, LONGEST = 32, 12, 14
GAP_US = 20
MEASURED = ("ms", "kernel_ms", "gaps_ms", "launches", "guards_ms", "longest", "host", "graph_ms", "kernels_graph")


class TokenMarker(TokenTimer):
    """A `TokenTimer` whose calls are ranges of the profile."""

    def __call__(self, input_ids, scores, **kwargs):
        with torch.profiler.record_function("end of a token"):
            return super().__call__(input_ids, scores, **kwargs)


def generate(model, batch: int, new_tokens: int, timer: TokenTimer):
    options = {"max_new_tokens": new_tokens, "do_sample": False, "cache_implementation": "static"}
    prompt = random_tokens(model, batch, DECODE_CONTEXT)
    model.generate(prompt, stopping_criteria=StoppingCriteriaList([timer]), **options)


def profile_tokens(model, batch: int) -> dict:
    """The columns of the profile, after the model has generated before."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        generate(model, batch, PROFILED, TokenMarker())
    events = profiler.events()
    kernels = sorted(
        (e.time_range.start, e.time_range.end, e.name)
        for e in events
        if e.device_type == DeviceType.CUDA and not e.is_user_annotation
    )
    host = [e for e in events if e.device_type == DeviceType.CPU]
    ends = sorted(e.time_range.end for e in host if e.name == "end of a token")
    tokens = list(zip(ends, ends[1:], strict=False))[PROFILED // 2 :]
    rows, on_gpu, on_host = [], Counter(), Counter()
    for begin, end in tokens:
        inside = [kernel for kernel in kernels if begin <= kernel[0] < end]
        called = [e for e in host if begin <= e.time_range.start < end]
        for start, stop, name in inside:
            on_gpu[name] += stop - start
        for e in called:
            on_host[e.name] += e.time_range.elapsed_us()
        gaps = [after[0] - before[1] for before, after in zip(inside, inside[1:], strict=False)]
        rows.append(
            {
                "kernel_ms": sum(stop - start for start, stop, _ in inside) / 1e3,
                "gaps_ms": sum(gap for gap in gaps if 0 < gap < GAP_US) / 1e3,
                "guards_ms": sum(e.time_range.elapsed_us() for e in called if "Cache Lookup" in e.name) / 1e3,
                "launches": len(inside),
            }
        )
    found = {name: round(statistics.median(row[name] for row in rows), 3) for name in rows[0]}
    names = Counter(name for begin, end in tokens for start, _, name in kernels if begin <= start < end)
    calls = Counter(e.name for begin, end in tokens for e in host if begin <= e.time_range.start < end)
    for column, times, numbers in (("longest", on_gpu, names), ("host", on_host, calls)):
        found[column] = [
            [name[:70], round(numbers[name] / len(tokens), 1), round(us / len(tokens) / 1e3, 4)]
            for name, us in times.most_common(LONGEST)
        ]
    return found


def graph_columns(model, batch: int) -> dict:
    """Time and number of kernels of the step as one CUDA graph, without torch.compile."""
    with torch.no_grad():
        graph, used = step_graph(model, random_tokens(model, batch, DECODE_CONTEXT))
    ms = median_ms(graph.replay, 20, behind=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        graph.replay()
        torch.cuda.synchronize()
    events = [e for e in profiler.key_averages() if e.self_device_time_total > 0]
    times = sorted(
        ([e.key[:70], e.count, round(e.self_device_time_total / 1e3, 4)] for e in events), key=lambda row: -row[2]
    )
    del used
    return {"graph_ms": round(ms, 3), "kernels_graph": times[:LONGEST]}


def profiled(model, batch: int) -> dict:
    generate(model, batch, NEW_TOKENS // 2, TokenTimer())
    found = {"ms": measure(model, batch, DECODE_CONTEXT, NEW_TOKENS, "static")["ms"]}
    found |= profile_tokens(model, batch)
    return found | (graph_columns(model, batch) if hasattr(model.config, "mixer_types") else {})


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--mixers", nargs="+", choices=MIXERS, default=list(MIXERS))
    parser.add_argument("--decode-batches", nargs="+", type=int, default=[1])
    parser.add_argument("--commit", default=commit(), help="for machines that hold no git checkout")
    args = parser.parse_args()
    machine = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    rows = []
    for mixer in args.mixers:
        model = build(None if mixer == "attention" else mixer)
        for batch in args.decode_batches:
            torch._dynamo.reset()
            row = {"mixer": mixer, "B": batch, "T": DECODE_CONTEXT, **profiled(model, batch)}
            rows.append(row | machine | {"commit": args.commit})
            print(json.dumps(row), flush=True)
            write_merged(args.out, rows, MEASURED)
        del model
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
