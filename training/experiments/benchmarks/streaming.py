"""Measures a conversion by streaming of two published shapes, with random weights, against what --dry-run estimates.

    python streaming.py --work FOLDER            # 35 GB of disk; both shapes
    taskset -c 0,1 python streaming.py --work FOLDER --shape qwen3-0.6b      # on two cores

For each shape a teacher is written in shards of 5 GB, its files are dropped from the page cache, and two new processes
run: the estimate, then the conversion. Peak memory is `ru_maxrss` of the process, interpreter and libraries included.
The figures go to results/streaming.json. All model folders are removed at the end.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

RESULTS = Path(__file__).parent / "results" / "streaming.json"
# fields of the published config.json
SHAPES = {
    "llama-8b": {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
    },
    "qwen3-0.6b": {
        "model_type": "qwen3",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": True,
    },
}
POOL = 2**26  # random values from which all weights are taken


def make_teacher(shape: str, folder: Path, **changed) -> None:
    """Write a teacher in bf16 with weights from N(0, 0.02), norms included. Values repeat after `POOL`.

    changed: fields of the configuration that differ from the shape.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from hf_memmix.conversion.streaming.checkpoint import PIECE
    from hf_memmix.conversion.streaming.matching import as_saved
    from hf_memmix.conversion.streaming.shards import ShardWriter
    from hf_memmix.conversion.streaming.stream import write_description

    fields = SHAPES[shape] | changed
    config = AutoConfig.for_model(fields.pop("model_type"), **fields, dtype="bfloat16")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    pool = torch.randn(POOL, generator=generator).mul_(0.02).bfloat16()
    folder.mkdir(parents=True)
    write_description(model, folder)
    tensors = as_saved(model)
    with ShardWriter(folder, tensors, model.num_parameters()) as writer:
        for name, tensor in tensors.items():
            writer.write(name, _values(pool, tensor.numel(), PIECE // 2, generator))


def _values(pool, count: int, piece: int, generator):
    """`count` values in pieces, from random places of the pool."""
    import torch

    while count:
        size = min(piece, count)
        start = int(torch.randint(len(pool) - size + 1, (), generator=generator))
        yield pool[start : start + size]
        count -= size


def drop_from_cache(folder: Path) -> None:
    """Make the next read of a folder's files come from the disk."""
    for file in folder.iterdir():
        handle = os.open(file, os.O_RDONLY)
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def child(*arguments) -> tuple[dict, object, float]:
    """Run this file in a new process. Returns the JSON that it prints, its resource usage and its wall time."""
    start = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, __file__, *map(str, arguments)], stdout=subprocess.PIPE, text=True, env=os.environ
    )
    text = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"the process of {arguments[0]} failed with code {process.returncode}")
    return json.loads(text or "{}"), usage, time.perf_counter() - start


def run_estimate(teacher: Path, out: Path, mixer: str) -> None:
    """Print what --dry-run estimates."""
    from hf_memmix.conversion.estimate import estimate, meta_teacher

    print(json.dumps(estimate(meta_teacher(teacher), mixer, place=out.parent)["streaming"]))


def run_convert(teacher: Path, out: Path, mixer: str) -> None:
    """Convert a folder and print the seconds that it took, without the import of the libraries."""
    from hf_memmix.conversion import convert_model

    start = time.perf_counter()
    convert_model(teacher, mixer, out=out)
    print(json.dumps({"seconds": time.perf_counter() - start}))


def measure(shape: str, mixer: str, work: Path) -> dict:
    """Estimate and conversion of one shape: bytes, seconds, and both side by side."""
    teacher, out = work / f"{shape}-teacher", work / f"{shape}-student"
    if not teacher.exists():
        child("--make", shape, "--work", work)
    drop_from_cache(teacher)
    estimated, _, _ = child("--estimate", teacher, "--out", out, "--mixer", mixer)
    drop_from_cache(teacher)
    own, usage, wall = child("--convert", teacher, "--out", out, "--mixer", mixer)
    measured = {
        "peak_memory": usage.ru_maxrss * 1024,
        "reads": sum(file.stat().st_size for file in teacher.glob("*.safetensors")),
        "writes": sum(file.stat().st_size for file in out.glob("*.safetensors")),
        "seconds": own["seconds"],
    }
    shutil.rmtree(out)
    return {
        "shape": shape,
        "mixer": mixer,
        "largest_shard": max(file.stat().st_size for file in teacher.glob("*.safetensors")),
        "measured": measured | {"seconds_with_imports": wall, "cpu_seconds": usage.ru_utime + usage.ru_stime},
        "estimated": estimated,
        "estimated_over_measured": {name: round(estimated[name] / value, 3) for name, value in measured.items()},
    }


def _key(row: dict) -> tuple:
    return row["shape"], row["mixer"], row["environment"]["hardware"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, help="folder for teachers and students; 35 GB of disk")
    parser.add_argument("--shape", choices=SHAPES, action="append", help="default: all")
    parser.add_argument("--mixer", default="gka")
    parser.add_argument("--keep-teacher", action="store_true", help="leave the teacher for the next run")
    for name in ("--make", "--estimate", "--convert", "--out"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.make:
        return make_teacher(args.make, args.work / f"{args.make}-teacher")
    if args.estimate or args.convert:
        run = run_estimate if args.estimate else run_convert
        return run(Path(args.estimate or args.convert), Path(args.out), args.mixer)

    from hf_memmix.conversion.records import environment, write_json

    rows = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else []
    for shape in args.shape or SHAPES:
        row = measure(shape, args.mixer, args.work) | {
            "cores": len(os.sched_getaffinity(0)),
            "environment": environment("cpu"),
        }
        rows = [old for old in rows if _key(old) != _key(row)] + [row]
        write_json(RESULTS, {"rows": rows})
        print(json.dumps({name: row[name] for name in ("shape", "measured", "estimated_over_measured")}, indent=1))
        if not args.keep_teacher:
            shutil.rmtree(args.work / f"{shape}-teacher")
    return None


if __name__ == "__main__":
    main()
