"""Measures one CUDA graph of a decode step in several ways: how much of its time is the host's, on one GPU.

    python kernels/benchmarks/graph_time.py --out kernels/benchmarks/results/graph_time_h200.json
    python kernels/benchmarks/graph_time.py --generate --out kernels/benchmarks/results/graph_time_h200.json

The model is GKA of `benchmark_model.py` at B = 1, its step without torch.compile (`graph_columns` of
decode_profile.py). "apart" runs the short convolutions and unit norms of a layer one after the other; "again" is a
second graph of "at once", whose tensors lie elsewhere. A row is one graph and one state:

    fresh       nothing else has happened in the process
    generated   `generate()` has compiled the model before (--generate; then no other state)
    beside      beside `PROCESSES` processes that hold the GPU and do nothing
    profiled    after the first use of torch.profiler in the process
    busy        beside two processes per core that only count

Columns are milliseconds, medians of rounds in which the graphs take turns:

    idle          between two events around one replay; the GPU waits when the first event is recorded
    behind        the same, but the GPU is still busy with other work while the host launches the graph
    back_to_back  events around 20 replays, per replay
    host          what the call of `replay` takes on the host
    first         the first replay of all, as "idle"

`kernel_ms` is the sum of the times of the kernels of one replay, `clock_mhz` the clock of the multiprocessors after
the last round. `logits_error` is the rms difference of the logits of 8 tokens from those of the same model in float32,
relative to their rms, over all `PROMPTS` prompts; `logits_errors` has the rms difference of each prompt, also
relative to the rms over all prompts.
`logits_from_apart` is the largest difference of the same logits, in bf16, from those of "apart", relative to the
largest logit.
"""

import argparse
import contextlib
import copy
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import triton
from benchmark import commit, write_merged
from benchmark_generate import TokenTimer, build
from benchmark_model import DECODE_CONTEXT, between_events, kernel_times, random_tokens
from decode_profile import generate

from hf_memmix.training.experiments.benchmarks.quantized import step_graph
from hf_memmix_kernels.short_conv import op as short_conv_op

ROUNDS, REPLAYS, TOKENS, PROMPTS, PROCESSES = 4, 20, 8, 6, 7
WAYS = ("idle", "behind", "back_to_back", "host")
MEASURED = (*WAYS, "first", "kernel_ms", "clock_mhz", "logits_error", "logits_errors", "logits_from_apart")
GRAPHS = ("at once", "apart", "again")
HOLD = "import torch, time; torch.ones(1, device='cuda'); print('ready', flush=True); time.sleep(600)"
COUNT = "print('ready', flush=True)\nwhile True: pass"


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
        "behind": statistics.median(between_events(graph.replay, behind=True) for _ in range(REPLAYS)),
        "back_to_back": between_events(many, behind=True) / REPLAYS,
        "host": statistics.median(on_host(graph.replay) for _ in range(REPLAYS)),
    }


def clock() -> int | None:
    """The clock of the multiprocessors in MHz, None where nvidia-smi does not say it."""
    which = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
    command = ["nvidia-smi", "-i", which, "--query-gpu=clocks.sm", "--format=csv,noheader,nounits"]
    said = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    return int(said) if said.isdigit() else None


@contextlib.contextmanager
def beside(program: str, number: int):
    """Beside so many processes of a program that has begun its work."""
    command = [sys.executable, "-c", program]
    others = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(number)]
    try:
        for process in others:
            process.stdout.readline()
        yield
    finally:
        for process in others:
            process.kill()
            process.wait()


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
    graphs, rows, found, largest = {}, {}, {}, short_conv_op.MAX_HEAD
    prompts, prompt = random_tokens(model, PROMPTS, 64).split(1), random_tokens(model, 1, DECODE_CONTEXT)
    exact = copy.deepcopy(model).float()
    want = torch.cat([logits(exact, tokens) for tokens in prompts])
    del exact
    for name in GRAPHS:
        short_conv_op.MAX_HEAD = 0 if name == "apart" else largest
        found[name] = torch.cat([logits(model, tokens) for tokens in prompts])
        errors = (found[name] - want).square().mean((1, 2)) / want.square().mean()
        with torch.no_grad():
            graphs[name] = step_graph(model, prompt)
        rows[name] = {
            "first": round(between_events(graphs[name][0].replay), 3),
            "logits_error": round(errors.mean().sqrt().item(), 5),
            "logits_errors": [round(error, 5) for error in errors.sqrt().tolist()],
        }
    short_conv_op.MAX_HEAD, apart = largest, found["apart"]
    for name, row in rows.items():
        row["logits_from_apart"] = round(((found[name] - apart).abs().max() / apart.abs().max()).item(), 5)
    torch.cuda.empty_cache()
    return graphs, rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--generate", action="store_true", help='the state "generated"')
    parser.add_argument(
        "--wait-for", type=Path, help="measure as soon as this file is there; the graphs are made before"
    )
    parser.add_argument("--commit", default=commit(), help="for machines that hold no git checkout")
    args = parser.parse_args()
    model = build("gka")
    if args.generate:
        for _ in range(2):
            generate(model, 1, 8, TokenTimer())
    graphs, firsts = graphs_of(model)
    while args.wait_for is not None and not args.wait_for.exists():
        time.sleep(0.2)
    machine = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    nothing, busy = contextlib.nullcontext, 2 * len(os.sched_getaffinity(0))
    states = {
        "fresh": nothing,
        "beside": lambda: beside(HOLD, PROCESSES),
        "profiled": nothing,
        "busy": lambda: beside(COUNT, busy),
    }
    rows, kernels = [], {}
    for state, around in {"generated": nothing}.items() if args.generate else states.items():
        if state == "profiled":
            kernels = {
                name: {"kernel_ms": round(kernel_times(graph.replay)[0], 3)} for name, (graph, _) in graphs.items()
            }
        with around():
            rounds = [{name: measure(graph) for name, (graph, _) in graphs.items()} for _ in range(ROUNDS)]
            clock_mhz = clock()
        for name in GRAPHS:
            row = {"mixer": "gka", "B": 1, "T": DECODE_CONTEXT, "graph": name, "state": state}
            row |= {way: round(statistics.median(turn[name][way] for turn in rounds), 3) for way in WAYS}
            row |= firsts[name] | kernels.get(name, {}) | {"clock_mhz": clock_mhz}
            rows.append(row | machine | {"commit": args.commit})
            print(json.dumps(row), flush=True)
        write_merged(args.out, rows, MEASURED)


if __name__ == "__main__":
    main()
