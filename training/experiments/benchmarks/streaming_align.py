"""Measures `memmix align --stream` on a published shape with random weights, within the memory of a smaller GPU.

    python streaming_align.py --work FOLDER  # Llama 8B, one GPU, 8 GB of disk
    python streaming_align.py --work FOLDER --tiny --out x.json  # seconds on a CPU, to try it

The teacher has the widths of the shape, but only a few layers: layers have the same size and pass through the GPU one
after the other, so each one costs the same. The hours of a whole run are computed from the seconds of the measured
layers, without the first one, whose time contains the compilation of kernels:

    hours = layers * (load + tokens * (advance + train) / measured tokens) / 3600

The memory of PyTorch on the GPU is limited to `--limit` GiB. A second part aligns the bundled teacher in bf16 (in fp32
on a CPU) with and without --stream and compares the losses, without and with clipping of gradients to the norm
`--clip`. A third part (`--part processes`) runs the command on the bundled teacher with one process and with
two, and compares losses and weights: with `accelerate launch` on two GPUs, on a CPU with `torchrun`. A fourth part
(`--part shape_processes`) does the same with the widths of the shape and `--layers` layers, and measures speed and
memory of each GPU. The figures go to results/streaming_align.json.

The losses of two runs are the same if no step differs by more than `TOLERANCE`, relative to the first one.
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
# largest relative difference between the losses of a step. In bf16 the order of a sum changes the third digit of a
# product; clipping takes the norm of one layer and not of all
TOLERANCE = {"unclipped": {"float32": 1e-6, "bfloat16": 1e-3}, "clipped": {"float32": 1e-2, "bfloat16": 1e-2}}
TOLERANCE["processes"] = 1e-6  # the same layers and rows, in another process


def measure(args) -> dict:
    """The figures of one run."""
    import torch

    from hf_memmix.conversion import convert_model
    from hf_memmix.conversion.records import environment
    from hf_memmix.conversion.streaming.conversion_cost import peak_memory, reset_peak
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


def compare(args) -> dict:
    """Losses of the bundled teacher with and without streaming; in bf16 on a GPU, in fp32 on a CPU."""
    import torch

    from hf_memmix.assets import asset_path
    from hf_memmix.conversion import convert_model, load_model, save_student
    from hf_memmix.conversion.loading import load_tokenizer
    from hf_memmix.conversion.records import environment
    from hf_memmix.training.data import TokenBlocks
    from hf_memmix.training.experiments.bundled.versions import bundled_teacher
    from hf_memmix.training.streaming import align_by_streaming
    from hf_memmix.training.train import align

    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    folder, student = args.work / "bundled-teacher", args.work / "bundled-student"
    teacher = load_model(asset_path("tiny_teacher"), dtype)
    teacher.save_pretrained(folder)
    teacher = load_model(folder)
    save_student(convert_model(teacher, args.mixer), student, overwrite=True)
    tokenizer = load_tokenizer(asset_path("tiny_teacher"))
    steps, length = (4, 32) if args.tiny else (20, 128)
    data = TokenBlocks.from_files(asset_path("dev.txt"), tokenizer, length)
    options = {"steps": steps, "batch_size": 8, "block_size": length, "warmup_steps": 2, "save_every": 0}
    losses = {}
    for clip in (0.0, args.clip):
        trainer = {"logging_steps": 1, "disable_tqdm": True, "max_grad_norm": clip}
        model = load_model(student)
        memory = align(model, teacher, data, args.work / f"bundled-run-{clip}", trainer=trainer, **options)
        streamed = align_by_streaming(
            student, folder, data, args.work / "bundled-out", trainer=trainer, overwrite=True, **options
        )
        both = [[row["loss"] for row in run["log"]] for run in (memory, streamed)]
        worst, name = _largest_difference(*both), "clipped" if clip else "unclipped"
        tolerance = TOLERANCE[name][str(dtype).removeprefix("torch.")]
        losses[name] = {
            "memory": both[0],
            "streamed": both[1],
            "largest_difference": worst,
            "tolerance": tolerance,
            "same": worst <= tolerance,
        }
    for folder in args.work.glob("bundled-*"):
        shutil.rmtree(folder)
    if losses["clipped"]["memory"] == losses["unclipped"]["memory"]:
        raise SystemExit(f"no gradient was clipped by the norm {args.clip}; give a smaller one with --clip")
    record = {
        "mixer": args.mixer,
        "clip": args.clip,
        "dtype": str(dtype).removeprefix("torch."),
        "teacher": bundled_teacher(),
        "environment": environment(),
    }
    return record | {"options": options} | losses


def _largest_difference(first: list[float], second: list[float]) -> float:
    """Of two lists of losses, relative to the first one."""
    return max(abs(a - b) / a for a, b in zip(first, second, strict=True))


# a script that runs memmix with a part of the memory of its GPU (0: all of it), and prints every so many seconds where
# each thread of it stands
WATCHED = """import faulthandler, os, runpy, sys
import torch
faulthandler.dump_traceback_later(float(sys.argv.pop(1)), repeat=True)
if limit := float(sys.argv.pop(1)):
    gpu = int(os.environ.get("LOCAL_RANK", "0"))
    total = torch.cuda.get_device_properties(gpu).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit * 2**30 / total), gpu)
runpy.run_module("hf_memmix_cli", run_name="__main__", alter_sys=True)
"""


def launched(count: int, options: list, args) -> dict:
    """The result of `memmix align --stream` with `count` processes, on GPUs if there are any.

    What it writes to stderr goes to the file `OUT.COUNT.log` beside `--out`.

    Raises:
        SystemExit: it failed, it took longer than `--patience`, or the processes did not share the layers.
    """
    import torch

    from hf_memmix.conversion.records import CHECKOUT

    script, log = args.work / "watched.py", args.out.with_suffix(f".{count}.log")
    script.write_text(WATCHED)
    on_gpu = torch.cuda.is_available()
    command, environment = [sys.executable], {**os.environ}
    if count > 1 and on_gpu:
        command += ["-m", "accelerate.commands.launch", "--config_file", CHECKOUT / "training/accelerate/ddp.yaml"]
        command += ["--num_processes", count, "--main_process_port", 0]  # 0: a free port
    elif count > 1:  # `accelerate launch --cpu` starts one process only
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", count]
    if not on_gpu:
        environment["ACCELERATE_USE_CPU"] = "true"
    limit = args.limit if on_gpu else 0
    command += [script, args.patience / 3, limit, "align", "--stream", "--json", *options]
    start = time.perf_counter()
    with log.open("w") as errors:
        run = subprocess.Popen([*map(str, command)], env=environment, stdout=subprocess.PIPE, stderr=errors, text=True)
        try:
            told, _ = run.communicate(timeout=args.patience)
        except subprocess.TimeoutExpired:
            run.terminate()  # a launcher ends its processes
            try:
                run.communicate(timeout=10)
            except subprocess.TimeoutExpired:
                run.kill()
            raise SystemExit(f"{count} processes were not ready after {args.patience:.0f} s; see {log}") from None
    if run.returncode:
        raise SystemExit(f"{count} processes failed: {log.read_text()[-2000:]}")
    result = json.loads(told.strip().splitlines()[-1])
    for name in ("process", "device") if on_gpu else ("process",):
        if len({row[name] for row in result["layers"].values()}) != count:
            raise SystemExit(f"{count} processes were started, but the layers were trained so: {result['layers']}")
    return result | {"wall_seconds": round(time.perf_counter() - start, 2)}


def compare_processes(args) -> dict:
    """Losses and weights of the bundled pair from one process and from two, which train different layers."""
    from hf_memmix.assets import asset_path

    options = ["--batch-size", 8, "--block-size", 128, "--steps", 4 if args.tiny else 20]
    return _one_and_two(asset_path("tiny_teacher"), options, args)


def compare_shape_processes(args) -> dict:
    """As `compare_processes`, with the widths of the shape, and with speed and memory of each process.

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
        result = launched(count, [*options, "--out", out], args)
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
    worst = _largest_difference(runs[1]["losses"], runs[2]["losses"])
    on_gpu = torch.cuda.is_available()
    return {
        "mixer": args.mixer,
        "gpus": min(2, torch.cuda.device_count()),
        "limit": args.limit * 2**30 if on_gpu else None,
        "largest_weight_difference": difference,
        "largest_loss_difference": worst,
        "tolerance": TOLERANCE["processes"],
        "same": worst <= TOLERANCE["processes"],
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
    parser.add_argument("--part", choices=PARTS, action="append", help="default: run and same_losses; others stay")
    parser.add_argument("--mixer", default="gka")
    parser.add_argument(
        "--layers", type=int, default=4, help="of the teacher; the first and the last one are not timed"
    )
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--clip", type=float, default=0.01, help="largest norm of gradients of the run with clipping")
    parser.add_argument(
        "--patience", type=float, default=1800.0, help="seconds for each run of several processes, then it is ended"
    )
    parser.add_argument("--limit", type=float, default=24.0, help="GiB of GPU memory")
    parser.add_argument("--tiny", action="store_true", help="a small width, to try the script")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    from hf_memmix.conversion.records import write_json

    args.work.mkdir(parents=True, exist_ok=True)
    record = json.loads(args.out.read_text()) if args.out.exists() else {}
    for name in args.part or ("run", "same_losses"):
        found = PARTS[name](args)
        # losses are compared in several dtypes, on several machines
        record[name] = record.get(name, {}) | {found["dtype"]: found} if name == "same_losses" else found
        write_json(args.out, record)
        print(json.dumps(found))


PARTS = {
    "run": measure,
    "same_losses": compare,
    "processes": compare_processes,
    "shape_processes": compare_shape_processes,
}


if __name__ == "__main__":
    main()
