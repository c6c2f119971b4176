"""Measures one CUDA graph of a decode step in several ways: how much of its time is the host's, on one GPU.

    python kernels/benchmarks/graph_time.py --out kernels/benchmarks/results/graph_time_h200.json

The model is GKA of `benchmark_model.py` at B = 1, its step without torch.compile (`graph_columns` of
decode_profile.py). "apart" runs the short convolutions and unit norms of a layer one after the other. "again" is a
second graph of the same step, whose tensors lie elsewhere. A row is one graph and one state of the host: "quiet", or
"busy", where every core has two processes that only count. The ways take turns, and each column is a median, in
milliseconds:

    idle          between two events around one replay; the GPU waits when the first event is recorded
    behind        the same, but the GPU is still busy with other work while the host launches the graph
    back_to_back  events around 20 replays, per replay
    host          what the call of `replay` takes on the host
    first         the first replay of all, as "idle"

`kernel_ms` is the sum of the times of the kernels of one replay, `clock_mhz` the clock of the multiprocessors after
the last round. `logits_error` is the largest difference of the logits of 8 tokens from those of "apart", relative to
the largest logit.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import triton
from benchmark import commit, merge
from benchmark_generate import build
from benchmark_model import DECODE_CONTEXT, kernel_times, random_tokens

from hf_memmix.training.benchmarks.quantized import step_graph
from hf_memmix_kernels.short_conv import op as short_conv_op

ROUNDS, REPLAYS, TOKENS = 6, 20, 8
BUSY_CYCLES = 10_000_000  # of the GPU: some milliseconds, longer than a launch takes
WAYS = ("idle", "behind", "back_to_back", "host")
MEASURED = (*WAYS, "first", "kernel_ms", "clock_mhz", "logits_error")
LOAD = "while True: pass"


def between_events(call, busy: bool = False) -> float:
    """Milliseconds between two events around a call; behind other work of the GPU if `busy`."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    if busy:
        torch.cuda._sleep(BUSY_CYCLES)
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def on_host(call) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - start)


def measure(graph: torch.cuda.CUDAGraph) -> dict[str, float]:
    """One round: a median for every way."""

    def many():
        for _ in range(REPLAYS):
            graph.replay()

    return {
        "idle": statistics.median(between_events(graph.replay) for _ in range(REPLAYS)),
        "behind": statistics.median(between_events(graph.replay, busy=True) for _ in range(REPLAYS)),
        "back_to_back": between_events(many) / REPLAYS,
        "host": statistics.median(on_host(graph.replay) for _ in range(REPLAYS)),
    }


def clock() -> int | None:
    """The clock of the multiprocessors in MHz, None where nvidia-smi does not say it."""
    which = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
    command = ["nvidia-smi", "-i", which, "--query-gpu=clocks.sm", "--format=csv,noheader,nounits"]
    said = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    return int(said) if said.isdigit() else None


@torch.no_grad()
def logits(model, tokens: torch.Tensor) -> torch.Tensor:
    """Logits of the last `TOKENS` tokens, one step each after a prompt of all others."""
    out, found = model(tokens[:, :-TOKENS], use_cache=True, logits_to_keep=1), []
    for token in tokens[:, -TOKENS:].split(1, 1):
        out = model(token, past_key_values=out.past_key_values, use_cache=True)
        found.append(out.logits)
    return torch.cat(found, 1).float()


def graphs_of(model) -> tuple[dict, dict]:
    """The graphs by name, with the tensors they use, and the first columns of their rows."""
    graphs, rows, largest = {}, {}, short_conv_op.MAX_HEAD
    tokens, prompt = (random_tokens(model, 1, length) for length in (64, DECODE_CONTEXT))
    by_name = {}
    for name in ("at once", "apart", "again"):
        short_conv_op.MAX_HEAD = 0 if name == "apart" else largest
        by_name[name] = logits(model, tokens)
        with torch.no_grad():
            graphs[name] = step_graph(model, prompt)
        rows[name] = {"first": round(between_events(graphs[name][0].replay), 3)}
    short_conv_op.MAX_HEAD, want = largest, by_name["apart"]
    for name, got in by_name.items():
        rows[name]["logits_error"] = ((got - want).abs().max() / want.abs().max()).item()
    return graphs, rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--wait-for", type=Path, help="measure as soon as this file is there; the graphs are made before"
    )
    parser.add_argument("--commit", default=commit(), help="for machines that hold no git checkout")
    args = parser.parse_args()
    graphs, firsts = graphs_of(build("gka"))
    while args.wait_for is not None and not args.wait_for.exists():
        time.sleep(0.2)
    machine = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    rows = []
    for host in ("quiet", "busy"):
        cores = len(os.sched_getaffinity(0)) if host == "busy" else 0
        load = [subprocess.Popen([sys.executable, "-c", LOAD]) for _ in range(2 * cores)]
        try:
            rounds = [{name: measure(graph) for name, (graph, _) in graphs.items()} for _ in range(ROUNDS)]
        finally:
            for process in load:
                process.kill()
                process.wait()
        clock_mhz = clock()
        for name, (graph, _) in graphs.items():
            row = {"mixer": "gka", "B": 1, "T": DECODE_CONTEXT, "graph": name, "host_is": host}
            row |= {way: round(statistics.median(turn[name][way] for turn in rounds), 3) for way in WAYS}
            row |= firsts[name] | {"kernel_ms": round(kernel_times(graph.replay)[0], 3), "clock_mhz": clock_mhz}
            rows.append(row | machine | {"commit": args.commit})
            print(json.dumps(row), flush=True)
        args.out.write_text(json.dumps(merge(args.out, rows, MEASURED), indent=1) + "\n")


if __name__ == "__main__":
    main()
