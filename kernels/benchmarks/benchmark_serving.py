"""Throughput, capacity and time to the first token on vLLM: a Llama shape, and the same with memory layers.

    python kernels/benchmarks/benchmark_serving.py --out kernels/benchmarks/results/serving_h200.json
    python kernels/benchmarks/benchmark_serving.py --out FILE --models gka --lengths 16384 --concurrency 64
    python kernels/benchmarks/benchmark_serving.py --out FILE --merge OTHER.json ANOTHER.json

Random weights from a configuration, random tokens as prompts, greedy answers of a fixed length. Rows are added to the
file, a row of the same point is replaced, and the plot beside it is drawn anew. `--merge` measures nothing and adds
the rows of other files, which several GPUs may have written at the same time. Four measurements:

    fit         sequences of a length whose blocks fit into the memory that vLLM gives to sequences
    throughput  that many prompts at once, without prefix caching: requests/s and output tokens/s of the whole run, and
                tokens/s of the steps from the last prompt's first token to the end of the first answer, in which all
                sequences decode. Of several runs, that with the median speed of decoding is the row, which has the
                slowest and the fastest as well. A point that was left out is a row with the reason
    host        microseconds of a decode step of 1 and 16 sequences, by function of the host and by kernel of the GPU
                (serving_profile.py)
    prefix      seconds to the first token of one prompt, and of a second prompt that shares all but its last tokens

Before a point is measured, a short run of the same shape compiles its Triton kernels. A run in which kernels are still
compiled counts only if there is no other. Llama runs as vLLM's own model and through its Transformers backend. Every
engine has a process of its own, because PyTorch 2.11 refuses to capture the CUDA graphs of a second one, and has what
vLLM's defaults give it: the model runner, torch.compile and the modes of CUDA graphs. For a model that fails the run
goes on with the next one, and ends with an error.

Answers are compared with `generate()` by tests/serving (`make serve-test`), which also runs on a GPU.
"""

import argparse
import functools
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the scheduler is asked for its blocks
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

import torch
from serving_profile import Host, measure_gpu
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
WINDOW = 512  # tokens
MODELS = {
    "llama": "Llama",
    "gka": "every layer GKA",
    "gka_3of4": "3 of 4 layers GKA",
    "llama_transformers": "Llama through the Transformers backend",
    "gka_window": f"every layer GKA beside a window of {WINDOW} tokens",
    "window": f"every layer a window of {WINDOW} tokens and the first token",
}
OPTIONS = {
    "gka_window": {"gka": {"local_window": WINDOW}, "window": {"sinks": 0, "use_rope": True}},
    "window": {"window": {"window": WINDOW, "sinks": 1, "use_rope": True}},
}
PARTS = ("fit", "throughput", "host", "prefix")
TAIL = 64  # tokens of a prompt that are new although its prefix is known
MIN_STEPS = 8  # of a measurement of decoding alone
LONG = 6.0  # seconds: a point that takes longer is measured once
HOST_SEQUENCES = (1, 16)


def save_model(folder: Path, model: str, shape: str) -> Path:
    """A folder with a config.json, from which vLLM makes random weights."""
    config = LlamaConfig(**SHAPES[shape], dtype="bfloat16", bos_token_id=0, eos_token_id=1)
    config.architectures = ["LlamaForCausalLM"]
    if not model.startswith("llama"):
        mixer = "window" if model == "window" else "gka"
        every = 4 if model == "gka_3of4" else config.num_hidden_layers + 1
        kinds = ["attention" if i % every == every - 1 else mixer for i in range(config.num_hidden_layers)]
        config = hf_memmix.memmix_config(config, mixer_types=kinds, mixers=OPTIONS.get(model, {}))
        config.architectures = ["MemMixLlamaForCausalLM"]
    config.save_pretrained(folder / model)
    return folder / model


def prompts_of(count: int, length: int, vocabulary: int, seed: int = 0) -> list[dict]:
    """`count` prompts of random tokens."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, vocabulary, (count, length), generator=generator)
    return [{"prompt_token_ids": row} for row in tokens.tolist()]


class Compilations:
    """Counts the Triton kernels that are compiled, those found in Triton's cache on disk included."""

    def __init__(self):
        self.count = 0
        if torch.cuda.is_available():
            import triton

            hook = triton.knobs.runtime.jit_post_compile_hook  # vLLM's own, which warns
            triton.knobs.runtime.jit_post_compile_hook = functools.partial(self._compiled, hook)

    def _compiled(self, hook, *args, **kwargs):
        self.count += 1
        return hook(*args, **kwargs) if hook is not None else None


class Engine:
    """One model in vLLM, and the measurements of it."""

    def __init__(self, folder: Path, args, caching: bool):
        from vllm import LLM

        self.args, self.longest = args, max(args.lengths) + args.new_tokens + TAIL
        start = time.perf_counter()
        self.llm = LLM(
            str(folder), load_format="dummy", skip_tokenizer_init=True, max_model_len=self.longest, seed=0,
            max_num_seqs=max(args.concurrency), enable_prefix_caching=caching, dtype=args.dtype,
            enforce_eager=args.eager, gpu_memory_utilization=args.memory, disable_log_stats=True,
            long_prefill_token_threshold=args.pieces if caching else 0,
            model_impl="transformers" if folder.name == "llama_transformers" else "auto",
        )  # fmt: skip
        print(f"the engine started in {time.perf_counter() - start:.0f} s", flush=True)
        self.vocabulary = SHAPES[args.shape]["vocab_size"]
        self.compilations = Compilations()
        self.requests = 0

    @property
    def scheduler(self):
        return self.llm.llm_engine.engine_core.engine_core.scheduler

    @property
    def runner(self):
        return self.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner

    def defaults(self) -> dict:
        """What vLLM has chosen for this model."""
        return {
            "runner": type(self.runner).__module__.removeprefix("vllm.v1.worker."),
            "graphs": self.llm.llm_engine.vllm_config.compilation_config.cudagraph_mode.name,
            "groups": len(self.scheduler.kv_cache_config.kv_cache_groups),
        }

    def fit(self, length: int) -> int:
        """Sequences of `length` tokens whose blocks are there at once; one block belongs to no sequence."""
        config = self.scheduler.kv_cache_config
        blocks = 0
        for group in config.kv_cache_groups:
            is_attention = type(group.kv_cache_spec).__name__ != "MambaSpec"
            blocks += -(-length // group.kv_cache_spec.block_size) if is_attention else 1
        return (config.num_blocks - 1) // blocks

    def submit(self, length: int, count: int, new_tokens: int):
        """Submit `count` prompts of `length` tokens, which no earlier request had."""
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        for prompt in prompts_of(count, length, self.vocabulary, seed=self.requests):
            self.llm.llm_engine.add_request(str(self.requests), prompt, params)
            self.requests += 1

    def step(self) -> dict[str, int]:
        """One step of the engine: the number of new tokens so far, by request."""
        return {out.request_id: len(out.outputs[0].token_ids) for out in self.llm.llm_engine.step()}

    def finish(self):
        while self.llm.llm_engine.has_unfinished_requests():
            self.llm.llm_engine.step()

    def warm_up(self, length: int, count: int):
        """Compile the kernels of such prompts: prompts alone, next to each other, and next to rows that decode."""
        self.submit(length, 1, 4)
        self.finish()
        self.submit(length, min(count, 3), 6)
        self.finish()

    def throughput(self, length: int, count: int, end: float) -> dict:
        """`count` prompts of `length` tokens, submitted at once: the run with the median speed of decoding, of those
        in which no kernel was compiled. No run begins that would end after `end`.
        """
        clean, compiled = [], None
        for _ in range(2 * self.args.repeats):
            before = self.compilations.count
            row = self._throughput(length, count)
            row["kernels_compiled_meanwhile"] = self.compilations.count - before
            if row["kernels_compiled_meanwhile"]:
                compiled = row
            else:
                clean.append(row)
            is_enough = len(clean) >= (1 if row["seconds"] > LONG else self.args.repeats)
            if is_enough or time.perf_counter() + row["seconds"] > end:
                break
        runs = sorted(clean or [compiled], key=lambda row: row["decode_tokens_per_s"] or row["output_tokens_per_s"])
        speeds = [row["decode_tokens_per_s"] for row in runs if row["decode_tokens_per_s"]]
        slowest_and_fastest = [min(speeds), max(speeds)] if speeds else None
        return runs[len(runs) // 2] | {"runs": len(runs), "decode_slowest_and_fastest": slowest_and_fastest}

    def host(self, length: int, count: int) -> dict:
        """Where the time of a decode step of `count` sequences goes."""
        self.submit(length, count, self.args.new_tokens)
        seen = set()
        while len(seen) < count:
            seen |= self.step().keys()
        for _ in range(5):
            self.step()
        host = Host(self.runner, self.scheduler)
        found = host.measure(self.step)
        host.close()
        if torch.cuda.is_available():
            found |= measure_gpu(self.step)
        self.finish()
        return found

    def _throughput(self, length: int, count: int) -> dict:
        new, core = self.args.new_tokens, self.llm.llm_engine
        self.submit(length, count, new)
        start, first, produced, running = time.perf_counter(), {}, {}, 0
        decoding = None  # (time, tokens) at the first token of the last prompt
        decoded, steps = (start, 0), 0  # the same after the last step in which all sequences decode, and the steps
        while core.has_unfinished_requests():
            found = self.step()
            now = time.perf_counter()
            running = max(running, len(self.scheduler.running))
            produced |= found
            for request in found:
                first.setdefault(request, now - start)
            if decoding is not None and max(produced.values()) < new:
                decoded, steps = (now, sum(produced.values())), steps + 1
            if decoding is None and len(first) == count and max(produced.values()) < new:
                decoding = now, sum(produced.values())
        seconds, total = time.perf_counter() - start, sum(produced.values())
        # there is no such time if the last prompt was read when other sequences were done
        together = steps >= MIN_STEPS and (decoded[1] - decoding[1]) / (decoded[0] - decoding[0])
        return {
            "seconds": round(seconds, 3),
            "requests_per_s": round(count / seconds, 3),
            "output_tokens_per_s": round(total / seconds, 1),
            "decode_tokens_per_s": round(together, 1) if together else None,
            "first_token_s": round(statistics.median(first.values()), 4),
            "last_first_token_s": round(max(first.values()), 4),
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


def measure(folder: Path, args, end: float):
    """Yield the rows of one model. `args.parts` are either "prefix" alone or without it."""
    (model,) = args.models
    caching = args.parts == ["prefix"]
    engine = Engine(save_model(folder, model, args.shape), args, caching)
    chosen = {"model": model} | engine.defaults()
    for length in args.lengths:
        point = chosen | {"tokens": length}
        if "fit" in args.parts:
            yield {"part": "fit", **point, "sequences": engine.fit(length + args.new_tokens)}
        if caching:
            engine.prefix(length, first_seed=1000 * length)  # compiles
            found = engine.prefix(length, first_seed=1000 * length + 500)
            yield {"part": "prefix", **point, "pieces": args.pieces, **found}
    if "throughput" in args.parts:
        for row in measure_throughput(engine, args, end):
            yield {"part": "throughput", **chosen, **row}
    if "host" in args.parts:
        length = min(args.lengths)
        engine.warm_up(length, max(HOST_SEQUENCES))
        for count in HOST_SEQUENCES:
            yield {"part": "host", **chosen, "tokens": length, "sequences": count, **engine.host(length, count)}
    engine.close()


def measure_throughput(engine: Engine, args, end: float):
    """Yield the rows of all points, those with the fewest prompt tokens first; a point that takes too long as a row
    with the reason.
    """
    # by length: seconds of a prompt token, of which longer prompts take at least as many, and of all decode steps
    reading, decoding, warm = {}, {}, set()
    points = [(length, count) for length in args.lengths for count in args.concurrency]
    for length, count in sorted(points, key=lambda point: (point[0] * point[1], point)):
        row = {"tokens": length, "sequences": count, "new_tokens": args.new_tokens}
        known = reading.get(length) or max(reading.values(), default=0)
        needed = known * count * length + 2 * max(decoding.values(), default=0)
        left = end - time.perf_counter()
        if count * length > args.most_tokens:
            row["left_out"] = f"{count * length:,} prompt tokens, the limit of the run was {args.most_tokens:,}"
        elif needed > left or left <= 0:
            row["left_out"] = f"the run had {max(0, left):.0f} s left, about {needed:.0f} s are needed"
        else:
            if length not in warm:
                engine.warm_up(length, max(args.concurrency))
                warm.add(length)
            row |= engine.throughput(length, count, end)
            reading[length] = row["last_first_token_s"] / (count * length)
            decoding[length] = row["seconds"] - row["last_first_token_s"]
        yield row


def key_of(row: dict) -> tuple:
    """What a row is the measurement of."""
    return (
        row["part"],
        row["model"],
        row["tokens"],
        row["sequences"] if row["part"] in ("throughput", "host") else row.get("pieces"),
    )


def add(record: dict, row: dict):
    """Put a row into the record, in place of that of the same point. A row that was left out replaces none that was
    measured.
    """
    rows = {key_of(old): old for old in record["rows"]}
    if "left_out" not in row or "left_out" in rows.get(key_of(row), row):
        record["rows"] = list((rows | {key_of(row): row}).values())


def merge(record: dict, files: list[Path]):
    """Add the rows of other files of this program to the record.

    Raises:
        ValueError: a file is of another device, model shape, dtype or version.
    """
    for file in files:
        other = json.loads(file.read_text())
        for name in ("device", "shape", "dtype", "vllm", "torch"):
            if record.setdefault(name, other[name]) != other[name]:
                raise ValueError(f"{file}: {name} is {other[name]}, in the other files it is {record[name]}")
        for row in other["rows"]:
            add(record, row)


def plot(record: dict, path: Path):
    """Output tokens per second over the number of sequences, one panel per length."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [row for row in record["rows"] if row["part"] == "throughput" and "left_out" not in row]
    lengths = sorted({row["tokens"] for row in rows})
    if not lengths:
        return
    size = (4.2 * len(lengths), 4.2)
    figure, panels = plt.subplots(1, len(lengths), figsize=size, squeeze=False, layout="constrained")
    for panel, length in zip(panels[0], lengths, strict=True):
        # a model has the same colour in every panel
        for colour, (model, name) in enumerate(MODELS.items()):
            chosen = [row for row in rows if (row["tokens"], row["model"]) == (length, model)]
            found = sorted((row["sequences"], row["output_tokens_per_s"]) for row in chosen)
            if found:
                panel.plot(*zip(*found, strict=True), marker="o", color=f"C{colour}", label=name)
        panel.set(xscale="log", yscale="log", title=f"prompts of {length:,} tokens", xlabel="sequences at once")
        panel.grid(alpha=0.3)
    panels[0][0].set_ylabel("output tokens per second")
    lines = {line.get_label(): line for panel in panels[0] for line in panel.get_lines()}
    figure.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=3)
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
    parser.add_argument(
        "--seconds",
        type=float,
        default=float("inf"),
        help="of a model, with its start: points that take longer are left out",
    )
    parser.add_argument("--repeats", type=int, default=3, help="runs of a point, prompts of a measurement of a prefix")
    parser.add_argument(
        "--pieces", type=int, default=0, help="for the prefix: vLLM's --long-prefill-token-threshold, 0 without it"
    )
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--memory", type=float, default=0.9, help="share of the GPU's memory")
    parser.add_argument("--merge", type=Path, nargs="+", metavar="FILE", help="add the rows of these files")
    parser.add_argument("--eager", action="store_true", help="neither torch.compile nor CUDA graphs")
    args = parser.parse_args()

    if args.merge:
        record = load(args.out)
        merge(record, args.merge)
        write(args.out, record)
        return
    alone = [part for part in args.parts if part == "prefix"]
    together = [part for part in args.parts if part != "prefix"]
    engines = [(model, parts) for model in args.models for parts in (together, alone) if parts]
    if len(engines) == 1:
        run(args)
        return
    failed = [" ".join([model, *parts]) for model, parts in engines if not run_alone(model, parts)]
    if failed:
        sys.exit(f"failed: {'; '.join(failed)}")


def run_alone(model: str, parts: list[str]) -> bool:
    """Measure parts of one model in a process of its own, which writes the same file; whether it succeeded."""
    print(f"{model}: {', '.join(parts)}", flush=True)
    command = [sys.executable, __file__, *sys.argv[1:], "--models", model, "--parts", *parts]
    return subprocess.run(command).returncode == 0


def load(path: Path) -> dict:
    return json.loads(path.read_text()) if path.exists() else {"rows": []}


def write(path: Path, record: dict):
    """The record, and the plot beside it."""
    path.write_text(json.dumps(record, indent=1) + "\n")
    plot(record, path.with_suffix(".png"))


def run(args):
    """Measure, and write the record after each row."""
    end = time.perf_counter() + args.seconds
    import vllm

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    record = load(args.out) | {"device": device, "shape": SHAPES[args.shape], "dtype": args.dtype}
    record |= {"vllm": vllm.__version__, "torch": torch.__version__}
    with tempfile.TemporaryDirectory() as folder:
        for row in measure(Path(folder), args, end):
            print(json.dumps(row), flush=True)
            add(record, row | {"commit": args.commit})
            args.out.write_text(json.dumps(record, indent=1) + "\n")
    write(args.out, record)


if __name__ == "__main__":
    main()
