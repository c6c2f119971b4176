"""Measures long inputs on one GPU: a Llama of 1.04 billion parameters, and the same Llama with a mixer in every layer.

    python kernels/benchmarks/benchmark_long.py --out kernels/benchmarks/results/long_h200.json

Weights (bf16) and tokens are random. "prompt" is `model.generate` with `prefill_chunk_size`: tokens of the prompt per
second up to the first new token, and the peak of allocated memory, in which the cache is included. "train" is forward,
backward and one fused AdamW step of one row with gradient checkpointing and the library's own loss. The GPU's events
measure the times. A prompt is measured once, after a short one that compiles the kernels; of training steps the median
counts, after one of `--untimed` tokens that compiles. A run that needs more memory than the GPU has is a row with the
`note` "out of memory". Rows of --out that describe the same measurement are replaced; all other rows are kept.
"""

import argparse
import json
import statistics
from pathlib import Path

import torch
import triton
from benchmark import commit, write_merged
from benchmark_model import MIXERS, random_tokens
from llama import build

PROMPTS = (16384, 131072, 1048576)
CHUNK = 8192  # tokens of a prompt that `generate` reads at a time
NEW_TOKENS = 8
TRAIN = 131072
PHASES = ("prompt", "train")
MEASURED = ("seconds", "tokens_s", "peak_mib", "cache_mib", "note")


def event() -> torch.cuda.Event:
    recorded = torch.cuda.Event(enable_timing=True)
    recorded.record()
    return recorded


def median_seconds(step, repeats: int, first=None) -> float:
    """Median of `repeats` calls of `step`, after one call of `first` (default: `step`) that compiles the kernels."""
    (first or step)()
    times = []
    for _ in range(repeats):
        start = event()
        step()
        end = event()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


class FirstToken:
    """A stopping criterion of `generate` that records an event at its first call and never stops the generation."""

    def __init__(self):
        self.event = None

    def __call__(self, input_ids, scores, **kwargs):
        self.event = self.event or event()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def cache_bytes(cache) -> int:
    """Bytes of states, keys and values in a cache, whether it is transformers' or ours."""
    found = getattr(cache, "nbytes", None)
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers) if found is None else found


def prompt(model, length: int) -> dict:
    """The measured columns of `generate` after a prompt of `length` tokens."""
    tokens, first = random_tokens(model, 1, length), FirstToken()
    torch.cuda.reset_peak_memory_stats()
    start = event()
    found = model.generate(
        tokens, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False, prefill_chunk_size=CHUNK,
        stopping_criteria=[first], return_dict_in_generate=True,
    )  # fmt: skip
    torch.cuda.synchronize()
    seconds = start.elapsed_time(first.event) / 1e3
    return {
        "seconds": round(seconds, 3),
        "tokens_s": round(length / seconds),
        "peak_mib": round(torch.cuda.max_memory_allocated() / 2**20),
        "cache_mib": round(cache_bytes(found.past_key_values) / 2**20, 2),
    }


def train(model, length: int, repeats: int, untimed: int) -> dict:
    """The measured columns of training steps of one row of `length` tokens, after a step of `untimed` tokens."""
    model.train()
    model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    tokens = random_tokens(model, 1, length)

    def step(length=length):
        model(tokens[:, :length], labels=tokens[:, :length], use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    torch.cuda.reset_peak_memory_stats()
    seconds = median_seconds(step, repeats, lambda: step(untimed))
    return {
        "seconds": round(seconds, 3),
        "tokens_s": round(length / seconds),
        "peak_mib": round(torch.cuda.max_memory_allocated() / 2**20),
    }


def measured(call, *args) -> dict:
    """The columns that `call` measures; a note if the GPU's memory is not enough."""
    try:
        return call(*args)
    except torch.OutOfMemoryError:
        return {"note": "out of memory"}


def rows_of(mixer: str, args):
    """One row per measurement, each as soon as it is there."""
    if "prompt" in args.phases:
        model = build(None if mixer == "attention" else mixer)
        prompt(model, 2 * CHUNK)  # compiles
        for length in args.prompts:
            yield {"phase": "prompt", "T": length, "chunk": CHUNK, **measured(prompt, model, length)}
        del model
    if "train" in args.phases:
        torch.cuda.empty_cache()
        model = build(None if mixer == "attention" else mixer)
        row = {"phase": "train", "T": args.train, "checkpointing": True}
        yield {**row, **measured(train, model, args.train, args.repeats, args.untimed or args.train)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--mixers", nargs="+", choices=MIXERS, default=list(MIXERS))
    parser.add_argument("--phases", nargs="+", choices=PHASES, default=list(PHASES))
    parser.add_argument("--prompts", nargs="+", type=int, default=list(PROMPTS), help="lengths in tokens")
    parser.add_argument("--train", type=int, default=TRAIN, help="tokens of the row of a training step")
    parser.add_argument("--untimed", type=int, help="tokens of the training step before (default: as --train)")
    parser.add_argument("--repeats", type=int, default=2, help="timed training steps, after one that is not timed")
    parser.add_argument("--commit", default=commit(), help="for machines that hold no git checkout")
    args = parser.parse_args()
    machine = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    for mixer in args.mixers:
        for row in rows_of(mixer, args):
            found = {"mixer": mixer, **row, **machine, "commit": args.commit}
            print(json.dumps({name: value for name, value in found.items() if name not in machine}), flush=True)
            write_merged(args.out, [found], MEASURED)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
