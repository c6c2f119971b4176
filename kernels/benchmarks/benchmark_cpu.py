"""Measures whole models on a CPU: a transformer, and the same transformer with a mixer in every layer.

    python kernels/benchmarks/benchmark_cpu.py --out kernels/benchmarks/results/cpu.json

"decode" is one token after a context of 1024, "prefill" one forward of 2048 tokens that fills a cache, "train" one
forward and backward of 2048 tokens; one sequence, fp32, no layer keeps its attention. Shapes: "tiny" is the bundled
transformer with its weights, "medium" a Llama of 4 layers with hidden size 1024 and random weights.

The models take turns, one call each per round, so that other programs on the machine slow down all of them alike. `ms`
and `cpu_ms` are medians over the rounds: time on the clock, and time of the process on all cores, which depends less
on other programs. For decode they are those of the faster cache, dynamic or static, as in `make demo`. `rounds` is how
many there were: no new one begins after 20 seconds, so that all rows take about 6 minutes on two idle cores.
`operators` is the number of torch operators that one call runs, which does not depend on the machine. `native` says
whether native code ran, which needs a C++ compiler; HF_MEMMIX_BACKEND=torch switches it off. Rows of --out that
describe the same measurement are replaced; all other rows are kept.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from hf_memmix.assets import asset_path
from hf_memmix.conversion import convert_model
from hf_memmix.conversion.records import commit, processor
from hf_memmix.training.evaluation.context_cost import filled_cache
from hf_memmix_kernels import _environment, _native

MIXERS = ("attention", "gka", "lattice", "mamba2", "ska", "coffee", "gated_delta", "kda", "window")
DECODE_CONTEXT, LENGTH = 1024, 2048
ROUNDS = {"decode": 61, "prefill": 5, "train": 3}
SECONDS = 20  # no new round of a phase begins later; one always runs
DESCRIBES = ("shape", "mixer", "phase", "T", "threads", "native")  # columns that say what a row measures
MEDIUM = {
    "vocab_size": 4096, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 4,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 4096,
}  # fmt: skip


def teacher(shape: str) -> torch.nn.Module:
    """The transformer of a shape, "tiny" or "medium"."""
    if shape == "tiny":
        return AutoModelForCausalLM.from_pretrained(asset_path("tiny_teacher"), dtype=torch.float32)
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**MEDIUM))


def models(shape: str, mixers: list[str]) -> dict[str, torch.nn.Module]:
    """One model per mixer; "attention" is the transformer itself."""
    transformer = teacher(shape)
    return {
        mixer: transformer if mixer == "attention" else convert_model(transformer, mixer=mixer, keep="none")
        for mixer in mixers
    }


def decode_calls(model: torch.nn.Module, steps: int) -> list[Callable[[], object]]:
    """A decode step with a dynamic cache, and one with a static cache; each can be called `steps` times."""
    token = torch.zeros(1, 1, dtype=torch.long)

    def step_with(cache):
        @torch.inference_mode()
        def step():
            # a step takes the same time at every position
            position = torch.full((1, 1), DECODE_CONTEXT)
            model(input_ids=token, position_ids=position, past_key_values=cache, use_cache=True)

        return step

    longest = DECODE_CONTEXT + steps
    return [step_with(filled_cache(model, DECODE_CONTEXT, length)) for length in (None, longest)]


def calls(phase: str, model: torch.nn.Module) -> list[Callable[[], object]]:
    """What is timed in a phase; of several calls the fastest counts."""
    if phase == "decode":
        return decode_calls(model.eval(), ROUNDS["decode"] + 3)
    tokens = torch.randint(3, model.config.vocab_size, (1, LENGTH))

    @torch.inference_mode()
    def prefill():
        model.eval()(tokens, use_cache=True, logits_to_keep=1)

    def train():
        model.train()(tokens, labels=tokens, use_cache=False).loss.backward()
        model.zero_grad()

    return [prefill if phase == "prefill" else train]


def operators(call: Callable[[], object]) -> int:
    """The number of torch operators of a call that no other operator calls. It runs the call once."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        call()
    return sum(event.name.startswith("aten::") and event.cpu_parent is None for event in profiler.events())


def measure(phase: str, built: dict[str, torch.nn.Module]) -> dict[str, dict]:
    """ms, cpu_ms, operators and rounds of every model."""
    timed = {mixer: calls(phase, model) for mixer, model in built.items()}
    counted = {mixer: operators(found[0]) for mixer, found in timed.items()}  # warms up, too
    for found in timed.values():
        for call in found[1:]:
            call()
    times = {mixer: [[] for _ in found] for mixer, found in timed.items()}
    began, rounds = time.perf_counter(), 0
    while rounds < ROUNDS[phase] and (not rounds or time.perf_counter() - began < SECONDS):
        for mixer, found in timed.items():
            for kept, call in zip(times[mixer], found, strict=True):
                wall, cpu = time.perf_counter(), time.process_time()
                call()
                kept.append((time.perf_counter() - wall, time.process_time() - cpu))
        rounds += 1
    rows = {}
    for mixer in timed:
        medians = [[1e3 * statistics.median(column) for column in zip(*kept, strict=True)] for kept in times[mixer]]
        ms, cpu_ms = (min(column) for column in zip(*medians, strict=True))
        rows[mixer] = {"ms": round(ms, 3), "cpu_ms": round(cpu_ms, 3), "operators": counted[mixer], "rounds": rounds}
    return rows


def merged(path: Path, rows: list[dict]) -> list[dict]:
    """The rows of the file with the new ones, which replace those of the same measurement."""
    old = json.loads(path.read_text()) if path.exists() else []
    return list({tuple(row[name] for name in DESCRIBES): row for row in [*old, *rows]}.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shapes", nargs="+", choices=("tiny", "medium"), default=["tiny", "medium"])
    parser.add_argument("--mixers", nargs="+", choices=MIXERS, default=list(MIXERS))
    parser.add_argument("--phases", nargs="+", choices=list(ROUNDS), default=list(ROUNDS))
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    args = parser.parse_args()
    machine = {
        "processor": processor(), "cores": os.cpu_count(), "torch": torch.__version__,
        "transformers": transformers.__version__, "commit": commit(),
    }  # fmt: skip
    native = _environment.backend() != "torch" and _native.library("gka") is not None
    for shape in args.shapes:
        built = models(shape, args.mixers)
        for threads in args.threads:
            torch.set_num_threads(threads)
            for phase in args.phases:
                length = DECODE_CONTEXT if phase == "decode" else LENGTH
                about = {"phase": phase, "T": length, "threads": threads, "native": native}
                rows = [
                    {"shape": shape, "mixer": mixer, **about, **row, **machine}
                    for mixer, row in measure(phase, built).items()
                ]
                for row in rows:
                    print(json.dumps({name: value for name, value in row.items() if name not in machine}), flush=True)
                args.out.parent.mkdir(parents=True, exist_ok=True)
                args.out.write_text(json.dumps(merged(args.out, rows), indent=1) + "\n")


if __name__ == "__main__":
    main()
