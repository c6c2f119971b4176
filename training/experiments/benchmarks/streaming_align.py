"""Measures `memmix align --stream` on a published shape with random weights, within the memory of a smaller GPU.

    python streaming_align.py --work FOLDER  # Llama 8B, one GPU, 8 GB of disk
    python streaming_align.py --work FOLDER --tiny --out x.json  # seconds on a CPU, to try it

The teacher has the widths of the shape, but only a few layers: layers have the same size and pass through the GPU one
after the other, so each one costs the same. The hours of a whole run are computed from the seconds of the measured
layers, without the first one, whose time contains the compilation of kernels:

    hours = layers * (load + tokens * (advance + train) / measured tokens) / 3600

The memory of PyTorch on the GPU is limited to `--limit` GiB. A second part (`--part shape_processes`) runs the command
on the widths of the shape with one process and with two: with `accelerate launch` on two GPUs, on a CPU with
`torchrun`. It compares losses and weights, and measures speed and memory of each GPU. The figures go to
results/streaming_align.json.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

RESULTS = Path(__file__).parent / "results" / "streaming_align.json"
SHAPE, WHOLE_TOKENS = "llama-8b", 2_000_000
TINY = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
TINY |= {"vocab_size": 512}
TOLERANCE = 1e-6  # largest relative difference of a step's loss: the same layers and rows, in another process


def measure(args) -> dict:
    """The figures of one run."""
    import torch

    from hf_memmix.conversion import convert_model
    from hf_memmix.conversion.records import environment
    from hf_memmix.operating_system import peak_memory, reset_peak
    from hf_memmix.training.data import TokenBlocks
    from hf_memmix.training.experiments.benchmarks.streaming import SHAPES, make_teacher
    from hf_memmix.training.recipe import load_recipe
    from hf_memmix.training.streaming import align_by_streaming

    on_gpu = torch.cuda.is_available()
    changed = {"num_hidden_layers": args.layers} | (TINY if args.tiny else {})
    teacher, student, out = (args.work / f"streaming-align-{name}" for name in ("teacher", "student", "out"))
    seconds = {}
    start = time.perf_counter()
    make_teacher(SHAPE, teacher, **changed)
    seconds["make"], start = time.perf_counter() - start, time.perf_counter()
    convert_model(teacher, args.mixer, out=student)
    seconds["convert"] = time.perf_counter() - start
    vocabulary = changed.get("vocab_size", SHAPES[SHAPE]["vocab_size"])
    recipe = load_recipe("align", steps=args.steps, block_size=64 if args.tiny else None)
    count = args.steps * recipe.tokens_per_step
    tokens = torch.randint(vocabulary, (count,), generator=torch.Generator().manual_seed(0))
    if on_gpu:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, args.limit * 2**30 / total))
        torch.cuda.reset_peak_memory_stats()
    reset_peak()
    start = time.perf_counter()
    result = align_by_streaming(
        student, teacher, TokenBlocks(tokens, recipe.block_size), out, recipe=recipe, overwrite=True, notify=print
    )
    seconds["align"] = time.perf_counter() - start
    layers = [row["seconds"] for layer, row in result["layers"].items() if layer not in ("0", str(args.layers - 1))]
    part = {name: sum(row[name] for row in layers) / len(layers) for name in ("load", "advance", "train")}
    depth = SHAPES[SHAPE]["num_hidden_layers"]
    per_layer = part["load"] + WHOLE_TOKENS * (part["advance"] + part["train"]) / count
    peak = {"host": peak_memory()}
    if on_gpu:
        peak |= {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
    data = TokenBlocks(tokens, recipe.block_size)
    dry = align_by_streaming(student, teacher, data, out, recipe=recipe, overwrite=True, dry_run=True)
    shutil.rmtree(out)
    shutil.rmtree(student)
    shutil.rmtree(teacher)
    return {
        "shape": SHAPE,
        "mixer": args.mixer,
        "tiny": args.tiny,
        "measured_layers": args.layers,
        "layers": depth,
        "batch_size": recipe.batch_size,
        "block_size": recipe.block_size,
        "steps": args.steps,
        "tokens": count,
        "limit": args.limit * 2**30 if on_gpu else None,
        "peak_memory": peak,
        "dry_run": dry["peak_memory"],
        "cost": result["cost"],
        "seconds": {name: round(value, 2) for name, value in seconds.items()},
        "seconds_by_layer": {layer: row["seconds"] for layer, row in result["layers"].items()},
        "losses": {layer: [row["first_loss"], row["last_loss"]] for layer, row in result["layers"].items()},
        "tokens_per_second": {
            "train": count / part["train"],
            "layer": count / (part["advance"] + part["train"]),
            "whole": WHOLE_TOKENS / (depth * per_layer),
        },
        "computed": {
            "tokens": WHOLE_TOKENS,
            "hours": depth * per_layer / 3600,
            "spool_bytes": round(result["cost"]["spool_bytes"] * WHOLE_TOKENS / count),
        },
        "environment": environment(),
    }


def launched(count: int, options: list) -> dict:
    """The result of `memmix align --stream` with `count` processes, on GPUs if there are any.

    Raises:
        SystemExit: it failed, or the processes did not share the layers.
    """
    import torch

    from hf_memmix.conversion.records import CHECKOUT

    on_gpu = torch.cuda.is_available()
    command, environment = [sys.executable], {**os.environ}
    if count > 1 and on_gpu:
        command += ["-m", "accelerate.commands.launch", "--config_file", CHECKOUT / "training/accelerate/ddp.yaml"]
        command += ["--num_processes", count, "--main_process_port", 0]  # 0: a free port
    elif count > 1:  # `accelerate launch --cpu` starts one process only
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", count]
    if not on_gpu:
        environment["ACCELERATE_USE_CPU"] = "true"
    command += ["-m", "hf_memmix_cli", "align", "--stream", "--json", *options]
    start = time.perf_counter()
    run = subprocess.run([*map(str, command)], env=environment, capture_output=True, text=True)
    if run.returncode:
        raise SystemExit(f"{count} processes failed: {run.stderr[-2000:]}")
    result = json.loads(run.stdout.strip().splitlines()[-1])
    if len({row["process"] for row in result["layers"].values()}) != count:
        raise SystemExit(f"{count} processes were started, but the layers were trained so: {result['layers']}")
    return result | {"wall_seconds": round(time.perf_counter() - start, 2)}


def compare_shape_processes(args) -> dict:
    """Losses and weights from one process and from two, which train different layers; speed and memory of each.

    The teacher has the vocabulary of the bundled tokenizer, because its texts are read.
    """
    from hf_memmix.assets import asset_path
    from hf_memmix.conversion.loading import read_config
    from hf_memmix.training.experiments.benchmarks.streaming import SHAPES, make_teacher
    from hf_memmix.training.recipe import load_recipe

    bundled, teacher = asset_path("tiny_teacher"), args.work / "bundled-shape"
    widths = (TINY if args.tiny else {}) | {"vocab_size": read_config(bundled).vocab_size}
    make_teacher(SHAPE, teacher, **widths, num_hidden_layers=args.layers)
    for file in bundled.glob("tokenizer*"):
        shutil.copy(file, teacher)
    recipe = load_recipe("align", steps=args.steps, block_size=64 if args.tiny else None)
    record = _one_and_two(teacher, ["--steps", recipe.steps, "--block-size", recipe.block_size], args)
    count, depth = recipe.steps * recipe.tokens_per_step, SHAPES[SHAPE]["num_hidden_layers"]
    for processes, run in record["runs"].items():
        layer = _seconds_of_a_layer(run["layers"])
        hours = depth / int(processes) * (layer["load"] + WHOLE_TOKENS * layer["work"] / count) / 3600
        run |= {
            "layer_tokens_per_second": count / layer["work"],  # of one process
            "computed": {"tokens": WHOLE_TOKENS, "hours": hours, "tokens_per_second": WHOLE_TOKENS / hours / 3600},
        }
    return {
        "shape": SHAPE,
        "tiny": args.tiny,
        "measured_layers": args.layers,
        "layers": depth,
        "batch_size": recipe.batch_size,
        "block_size": recipe.block_size,
        "steps": recipe.steps,
        "tokens": count,
        "speedup": record["runs"]["1"]["computed"]["hours"] / record["runs"]["2"]["computed"]["hours"],
    } | record


def _seconds_of_a_layer(layers: dict[str, dict]) -> dict[str, float]:
    """Mean seconds to `load` a layer and to compute it (`work`: advance and train).

    Without the first layer of each process, in which kernels are compiled. The last layer is not advanced.
    """
    first, parts = set(), {"load": [], "advance": [], "train": []}
    for row in layers.values():
        if row["process"] in first:
            for name, seconds in row["seconds"].items():
                parts[name].append(seconds)
        first.add(row["process"])
    mean = {name: sum(values) / len(values) for name, values in parts.items()}
    return {"load": mean["load"], "work": mean["advance"] + mean["train"]}


def _one_and_two(teacher: Path, options: list, args) -> dict:
    """`align --stream` of a teacher with one process and with two: what differs, and what each process needs."""
    import torch
    from safetensors import safe_open

    from hf_memmix.assets import asset_path
    from hf_memmix.conversion import convert_model
    from hf_memmix.conversion.records import environment

    start = args.work / "bundled-start"
    convert_model(teacher, args.mixer, out=start)
    options = ["--student", start, "--teacher", teacher, *options, "--logging-steps", 1, "--overwrite"]
    options += ["--text", asset_path("train.txt"), "--text", asset_path("dev.txt")]
    runs, outs = {}, {count: args.work / f"bundled-{count}" for count in (1, 2)}
    for count, out in outs.items():
        result = launched(count, [*options, "--out", out])
        runs[count] = {"losses": [row["loss"] for row in result["log"]], "gpu_memory": _memory_by_device(result)}
        runs[count] |= {name: result[name] for name in ("seconds", "wall_seconds", "layers", "cost")}
        print(f"{count} processes: {runs[count]['wall_seconds']} s", flush=True)
    difference = 0.0
    with (
        safe_open(str(outs[1] / "model.safetensors"), "pt") as one,
        safe_open(str(outs[2] / "model.safetensors"), "pt") as two,
    ):
        for name in one.keys():  # noqa: SIM118, no dict
            values = one.get_tensor(name), two.get_tensor(name)
            if not torch.equal(*values):
                difference = max(difference, (values[0].float() - values[1].float()).abs().max().item())
    for folder in args.work.glob("bundled-*"):
        shutil.rmtree(folder)
    losses = zip(runs[1]["losses"], runs[2]["losses"], strict=True)
    worst = max(abs(one - two) / one for one, two in losses)
    return {
        "mixer": args.mixer,
        "gpus": min(2, torch.cuda.device_count()),
        "largest_weight_difference": difference,
        "largest_loss_difference": worst,
        "tolerance": TOLERANCE,
        "same": worst <= TOLERANCE,
        "runs": {str(count): run for count, run in runs.items()},
        "environment": environment(),
    }


def _memory_by_device(result: dict) -> dict[str, dict]:
    """Largest peak memory of the processes by their GPU; empty on a CPU."""
    found = {}
    for row in result["layers"].values():
        if "peak_memory" in row:
            known = found.setdefault(row["device"], dict.fromkeys(row["peak_memory"], 0))
            found[row["device"]] = {name: max(known[name], size) for name, size in row["peak_memory"].items()}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, required=True, help="folder for the models and the spool")
    parser.add_argument("--part", choices=PARTS, action="append", help="default: run; the other stays")
    parser.add_argument("--mixer", default="gka")
    parser.add_argument(
        "--layers", type=int, default=4, help="of the teacher; the first and the last one are not timed"
    )
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--limit", type=float, default=24.0, help="GiB of GPU memory")
    parser.add_argument("--tiny", action="store_true", help="a small width, to try the script")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    from hf_memmix.conversion.records import write_json

    args.work.mkdir(parents=True, exist_ok=True)
    record = json.loads(args.out.read_text()) if args.out.exists() else {}
    for name in args.part or ("run",):
        record[name] = PARTS[name](args)
        write_json(args.out, record)
        print(json.dumps(record[name]))


PARTS = {"run": measure, "shape_processes": compare_shape_processes}


if __name__ == "__main__":
    main()
