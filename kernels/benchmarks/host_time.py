"""Measures prompts, training steps and eager tokens of several models in turns, with tapes and without, on one GPU.

    python kernels/benchmarks/host_time.py --out kernels/benchmarks/results/host_time_h200.json

The models are those of `benchmark_model.py`. "train" is a step without the optimizer, at 8 x 2048 and, as "short", at
1 x 512; "token" is the forward of one token after 1024, without torch.compile. In a round every model runs once
without tapes (each kernel is launched by Triton's Python) and once with them. `ms` is the median of CUDA events, from
before the call to after its last kernel, `host_ms` the median time until the call returns, while kernels may still
run: where the two are equal, the GPU waits for Python. `launches` are the Triton kernels of one call without tapes,
and `launch_us` is Python's median time to launch one. `peak_mib` is the peak of memory over what lay there before.
Rows of GKA with `"variant": "apart"` run the short convolutions and the unit norms of q, k and v of a prompt or a
token as functions, not in one call. `same` is true if the outputs with tapes are equal bit by bit to those without
tapes and in one call, also for rows "apart". Rows of "token" have no `same`, because each token changes the state.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import triton
from benchmark import commit, write_merged
from benchmark_generate import build
from benchmark_model import DECODE_CONTEXT, MIXERS, PREFILL, TRAIN, random_tokens
from triton.runtime.jit import JITFunction

from hf_memmix_kernels import _tape
from hf_memmix_kernels.short_conv import op as short_conv_op

MEASURED = ("ms", "host_ms", "rounds", "launches", "launch_us", "peak_mib", "same")
# phase: B, T and the name of its rows
PHASES = {
    "prefill": (*PREFILL[0], "prefill"), "compiled": (*PREFILL[0], "prefill"), "train": (*TRAIN[0], "train"),
    "short": (1, 512, "train"), "token": (1, DECODE_CONTEXT, "decode"),
}  # fmt: skip
WIDEST = short_conv_op.MAX_HEAD


def timed(call: Callable[[], object]) -> tuple[float, float]:
    """Milliseconds of one call: until it returns, and until its last kernel ends."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    began = time.perf_counter()
    call()
    host = time.perf_counter() - began
    end.record()
    end.synchronize()
    return 1e3 * host, start.elapsed_time(end)


def launches(call: Callable[[], object]) -> dict:
    """The number of Triton's launches in one call, and the median microseconds of one."""
    run, times = JITFunction.run, []

    def measured(function, *args, **kwargs):
        began = time.perf_counter()
        kernel = run(function, *args, **kwargs)
        times.append(time.perf_counter() - began)
        return kernel

    JITFunction.run = measured
    try:
        call()
    finally:
        JITFunction.run = run
    return {"launches": len(times)} | ({"launch_us": round(1e6 * statistics.median(times), 1)} if times else {})


def prompt(model, batch: int, length: int) -> Callable[[], torch.Tensor]:
    """A forward that fills a cache and returns the last logits."""
    tokens = random_tokens(model, batch, length)

    @torch.no_grad()
    def call():
        return model(tokens, use_cache=True, logits_to_keep=1).logits

    return call


def step(model, batch: int, length: int) -> Callable[[], torch.Tensor]:
    """A training step that returns the loss; its gradients are dropped, so that no step depends on the others."""
    tokens = random_tokens(model, batch, length)
    model.train()

    def call():
        loss = model(tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        model.zero_grad()
        return loss.detach()

    return call


def token(model, batch: int, length: int) -> Callable[[], torch.Tensor]:
    """A forward of one token after a prompt; it advances the cache."""
    with torch.no_grad():
        cache = model(random_tokens(model, batch, length), use_cache=True, logits_to_keep=1).past_key_values
    one = random_tokens(model, batch, 1)

    @torch.no_grad()
    def call():
        return model(one, past_key_values=cache, use_cache=True).logits

    return call


def choose(tapes: bool, variant: str | None) -> None:
    """With tapes or without; the convolutions and norms in one call or "apart"."""
    _tape.switch.on = tapes
    short_conv_op.MAX_HEAD = 0 if variant == "apart" else WIDEST


def ways(mixer: str, phase: str) -> list[tuple[bool, str | None]]:
    """Pairs of `choose`: without tapes and with them. Attention launches no Triton kernels."""
    if mixer == "attention":
        return [(False, None)]
    apart = mixer == "gka" and phase in ("prefill", "token")
    return [(False, None), (True, None), *([(True, "apart")] if apart else [])]


def rows_of(phase: str, mixers: list[str], rounds: int) -> list[dict]:
    """One row for each model and way."""
    batch, length, name = PHASES[phase]
    make = {"train": step, "prefill": prompt, "decode": token}[name]
    calls, rows, outputs = {}, {}, {}
    for mixer in mixers:
        choose(False, None)  # the prompt before a token runs alike for every model
        model = build(None if mixer == "attention" else mixer)
        calls[mixer] = make(torch.compile(model) if phase == "compiled" else model, batch, length)
        for tapes, variant in ways(mixer, phase):
            choose(tapes, variant)
            rows[mixer, tapes, variant] = row = {
                "mixer": mixer, "phase": name, "B": batch, "T": length,
                "compiled": phase == "compiled", "tapes": tapes, "rounds": [],
            } | ({"variant": variant} if variant else {})  # fmt: skip
            for _ in range(3):  # compiles, writes tapes, plays them
                outputs[mixer, tapes, variant] = calls[mixer]()
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            calls[mixer]()
            torch.cuda.synchronize()
            row["peak_mib"] = (torch.cuda.max_memory_allocated() - before) >> 20
    for (mixer, tapes, variant), row in rows.items():
        if tapes and name != "decode":
            row["same"] = torch.equal(outputs[mixer, False, None], outputs[mixer, tapes, variant])
        if not tapes and mixer != "attention":
            choose(False, None)
            row |= launches(calls[mixer])
    for _ in range(rounds):
        for (mixer, tapes, variant), row in rows.items():
            choose(tapes, variant)
            row["rounds"].append([round(ms, 2) for ms in timed(calls[mixer])])
    for row in rows.values():
        row["host_ms"], row["ms"] = (round(statistics.median(times), 2) for times in zip(*row["rounds"], strict=True))
    return list(rows.values())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--mixers", nargs="+", choices=MIXERS, default=list(MIXERS))
    parser.add_argument("--phases", nargs="+", choices=list(PHASES), default=list(PHASES))
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--commit", default=commit(), help="for machines that hold no git checkout")
    args = parser.parse_args()
    machine = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    for phase in args.phases:
        rows = [row | machine | {"commit": args.commit} for row in rows_of(phase, args.mixers, args.rounds)]
        for row in rows:
            print(json.dumps({name: x for name, x in row.items() if name not in (*machine, "rounds")}), flush=True)
        write_merged(args.out, rows, MEASURED)
        torch._dynamo.reset()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
