"""Throughput, capacity and time to the first token on vLLM: a Llama shape, and the same with GKA layers.

    python kernels/benchmarks/benchmark_serving.py --out kernels/benchmarks/results/serving_h200.json
    python kernels/benchmarks/benchmark_serving.py --out FILE --models gka --lengths 16384 --concurrency 64

Random weights from a configuration, random tokens as prompts, greedy answers of a fixed length. Rows are added to the
file, a row of the same point is replaced, and the plot beside it is drawn anew. Three measurements:

    fit         sequences of a length whose blocks fit into the memory that vLLM gives to sequences
    throughput  that many prompts at once, without prefix caching: requests/s, output tokens/s of the whole run, and
                tokens/s of the part in which all of them decode
    prefix      seconds to the first token of one prompt, and of a second prompt that shares all but its last tokens

Llama runs as vLLM's own model. Engines run in this process, one after the other. On a GPU give one model per call
(--models): after the first engine, PyTorch 2.11 refuses to capture the CUDA graphs of the second.
"""

import argparse
import gc
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the scheduler is asked for its blocks
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

import torch
from transformers import LlamaConfig

import hf_memmix

SHAPES = {
    "1b": {
        "vocab_size": 32000, "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 8192, "max_position_embeddings": 2**17,
    },
    "tiny": {
        "vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 32, "intermediate_size": 96, "max_position_embeddings": 2**12,
    },
}  # fmt: skip
MODELS = {"llama": "Llama", "gka": "every layer GKA", "gka_3of4": "3 of 4 layers GKA"}
PARTS = ("fit", "throughput", "prefix")
TAIL = 64  # tokens of a prompt that are new although its prefix is known


def save_model(folder: Path, model: str, shape: str) -> Path:
    """A folder with a config.json, from which vLLM makes random weights."""
    config = LlamaConfig(**SHAPES[shape], dtype="bfloat16", bos_token_id=0, eos_token_id=1)
    config.architectures = ["LlamaForCausalLM"]
    if model != "llama":
        every = 4 if model == "gka_3of4" else config.num_hidden_layers + 1
        kinds = ["attention" if i % every == every - 1 else "gka" for i in range(config.num_hidden_layers)]
        config = hf_memmix.memmix_config(config, mixer_types=kinds)
        config.architectures = ["MemMixLlamaForCausalLM"]
    config.save_pretrained(folder / model)
    return folder / model


def prompts_of(count: int, length: int, vocabulary: int, seed: int = 0) -> list[dict]:
    """`count` prompts of random tokens."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, vocabulary, (count, length), generator=generator)
    return [{"prompt_token_ids": row} for row in tokens.tolist()]


class Engine:
    """One model in vLLM, and the measurements of it."""

    def __init__(self, folder: Path, args, caching: bool):
        from vllm import LLM

        self.args, self.longest = args, max(args.lengths) + args.new_tokens + TAIL
        self.llm = LLM(
            str(folder), load_format="dummy", skip_tokenizer_init=True, max_model_len=self.longest, seed=0,
            max_num_seqs=max(args.concurrency), enable_prefix_caching=caching, dtype=args.dtype,
            enforce_eager=args.eager, gpu_memory_utilization=args.memory, disable_log_stats=True,
        )  # fmt: skip
        self.vocabulary = SHAPES[args.shape]["vocab_size"]

    @property
    def scheduler(self):
        return self.llm.llm_engine.engine_core.engine_core.scheduler

    def fit(self, length: int) -> int:
        """Sequences of `length` tokens whose blocks are there at once; one block belongs to no sequence."""
        config = self.scheduler.kv_cache_config
        blocks = 0
        for group in config.kv_cache_groups:
            is_attention = type(group.kv_cache_spec).__name__ != "MambaSpec"
            blocks += -(-length // group.kv_cache_spec.block_size) if is_attention else 1
        return (config.num_blocks - 1) // blocks

    def throughput(self, length: int, count: int) -> dict:
        """`count` prompts of `length` tokens, submitted at once."""
        from vllm import SamplingParams

        new = self.args.new_tokens
        params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
        core = self.llm.llm_engine
        for i, prompt in enumerate(prompts_of(count, length, self.vocabulary, seed=count)):
            core.add_request(f"{time.time_ns()}_{i}", prompt, params)
        start, first, produced, running = time.perf_counter(), {}, {}, 0
        decode_start, decoded = None, 0
        while core.has_unfinished_requests():
            outputs = core.step()
            now = time.perf_counter()
            running = max(running, len(self.scheduler.running))
            for output in outputs:
                produced[output.request_id] = len(output.outputs[0].token_ids)
                first.setdefault(output.request_id, now - start)
            if decode_start is None and len(first) == count:
                decode_start, decoded = now, sum(produced.values())
        seconds, total = time.perf_counter() - start, sum(produced.values())
        # the time in which all of them decode; there is none if the last prompt was read when others were done
        together = running == count and total > decoded
        decode_speed = (total - decoded) / (start + seconds - decode_start) if together else None
        return {
            "seconds": round(seconds, 3),
            "requests_per_s": round(count / seconds, 3),
            "output_tokens_per_s": round(total / seconds, 1),
            "decode_tokens_per_s": round(decode_speed, 1) if together else None,
            "first_token_s": round(statistics.median(first.values()), 4),
            "most_running": running,
        }

    def prefix(self, length: int, first_seed: int) -> dict:
        """Seconds to the first token, alone on the machine, cold and with a known prefix.

        `first_seed`: of the prompts, which must be new to this engine.
        """
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
        cold, hit, cached = [], [], []
        for attempt in range(self.args.repeats):
            (prompt, tail) = prompts_of(2, length, self.vocabulary, seed=first_seed + attempt)
            shared = prompt["prompt_token_ids"]
            second = {"prompt_token_ids": shared[:-TAIL] + tail["prompt_token_ids"][-TAIL:]}
            for times, request in ((cold, prompt), (hit, second)):
                start = time.perf_counter()
                (output,) = self.llm.generate([request], params, use_tqdm=False)
                times.append(time.perf_counter() - start)
            cached.append(output.num_cached_tokens)
        return {
            "first_token_s": round(statistics.median(cold), 4),
            "first_token_hit_s": round(statistics.median(hit), 4),
            "cached_tokens": min(cached),
        }

    def close(self):
        from vllm.distributed import cleanup_dist_env_and_memory

        self.llm.llm_engine.engine_core.shutdown()
        del self.llm
        gc.collect()
        cleanup_dist_env_and_memory()


def measure(folder: Path, args):
    """Yield the rows of all models."""
    for model in args.models:
        path = save_model(folder, model, args.shape)
        for caching in (False, True):
            parts = [part for part in args.parts if (part == "prefix") == caching]
            if not parts:
                continue
            engine = Engine(path, args, caching)
            for length in args.lengths:
                point = {"model": model, "tokens": length}
                if "fit" in parts:
                    yield {"part": "fit", **point, "sequences": engine.fit(length + args.new_tokens)}
                if "prefix" in parts:
                    engine.prefix(length, first_seed=1000 * length)  # compiles
                    yield {"part": "prefix", **point, **engine.prefix(length, first_seed=1000 * length + 500)}
                if "throughput" in parts:
                    engine.throughput(min(length, 512), 1)  # compiles
                    for count in args.concurrency:
                        if count * length > args.most_tokens:
                            print(f"left out: {count} sequences of {length} tokens, over --most-tokens", flush=True)
                            continue
                        engine.throughput(length, min(count, 4))  # compiles the kernels of this length
                        row = engine.throughput(length, count)
                        yield {"part": "throughput", **point, "sequences": count, "new_tokens": args.new_tokens, **row}
            engine.close()


def key_of(row: dict) -> tuple:
    """What a row is the measurement of."""
    return row["part"], row["model"], row["tokens"], row["sequences"] if row["part"] == "throughput" else None


def plot(record: dict, path: Path):
    """Output tokens per second over the number of sequences, one panel per length."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [row for row in record["rows"] if row["part"] == "throughput"]
    lengths = sorted({row["tokens"] for row in rows})
    if not lengths:
        return
    figure, panels = plt.subplots(1, len(lengths), figsize=(4.2 * len(lengths), 3.6), squeeze=False)
    for panel, length in zip(panels[0], lengths, strict=True):
        for model, name in MODELS.items():
            chosen = [row for row in rows if (row["tokens"], row["model"]) == (length, model)]
            found = sorted((row["sequences"], row["output_tokens_per_s"]) for row in chosen)
            if found:
                panel.plot(*zip(*found, strict=True), marker="o", label=name)
        panel.set(xscale="log", yscale="log", title=f"prompts of {length:,} tokens", xlabel="sequences at once")
        panel.grid(alpha=0.3)
    panels[0][0].set_ylabel("output tokens per second")
    panels[0][0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", default="unknown", help="commit of the tree, where the machine has no git")
    parser.add_argument("--shape", choices=SHAPES, default="1b")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--lengths", nargs="+", type=int, default=[2048, 16384, 65536])
    parser.add_argument("--concurrency", nargs="+", type=int, default=[1, 16, 64, 256])
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--most-tokens", type=int, default=2**23, help="leave out points with more prompt tokens")
    parser.add_argument("--repeats", type=int, default=3, help="prompts of a measurement of the first token")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--memory", type=float, default=0.9, help="share of the GPU's memory")
    parser.add_argument("--eager", action="store_true", help="neither torch.compile nor CUDA graphs")
    args = parser.parse_args()

    import vllm

    record = json.loads(args.out.read_text()) if args.out.exists() else {"rows": []}
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    record |= {"device": device, "shape": SHAPES[args.shape], "dtype": args.dtype, "commit": args.commit}
    record |= {"vllm": vllm.__version__, "torch": torch.__version__}
    rows = {key_of(row): row for row in record["rows"]}
    with tempfile.TemporaryDirectory() as folder:
        for row in measure(Path(folder), args):
            print(json.dumps(row), flush=True)
            rows[key_of(row)] = row
            record["rows"] = list(rows.values())
            args.out.write_text(json.dumps(record, indent=1) + "\n")
    plot(record, args.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
