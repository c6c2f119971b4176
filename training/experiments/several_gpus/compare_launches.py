"""Compares the training of one recipe on one GPU with that on two GPUs with DDP and FSDP2.

    python training/experiments/several_gpus/compare_launches.py

For each launch and stage it measures the loss curve, tokens/s, peak memory, and the scaling efficiency: tokens/s on
two GPUs divided by twice those on one. The global batch is the same in all launches, so the curves should differ only
by rounding. A run on one GPU with two accumulation steps shows how large that difference is. There are two models: the
bundled teacher, and a randomly initialised Llama of 1.2 billion parameters. All their layers become GKA; the second
student has 1.3 billion parameters.
"""

import gc
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import torch
import typer
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, TrainerCallback

from hf_memmix.assets import asset_path
from hf_memmix.conversion import convert_model, load_model
from hf_memmix.conversion.records import environment, write_json
from hf_memmix.launch import is_first, local_rank
from hf_memmix.training.data import TokenBlocks
from hf_memmix.training.experiments.bundled.versions import bundled_teacher
from hf_memmix.training.experiments.common.options import check_names
from hf_memmix.training.recipe import Recipe
from hf_memmix.training.train import train

CONFIGS = Path(__file__).resolve().parents[2] / "accelerate"
MODELS = {
    "bundled": {"batch_size": 64, "block_size": 512, "steps": {"align": 30, "distill": 30}},
    "1b": {"batch_size": 8, "block_size": 2048, "steps": {"align": 20, "distill": 20}},
}
ONE_B = {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
KINDS = ("halves", "ddp", "fsdp2")
WARM_UP = 5  # steps that are not timed


class StepTimer(TrainerCallback):
    """A Trainer callback that records the seconds of every step."""

    def __init__(self):
        self.seconds = []

    def on_step_begin(self, args, state, control, **kwargs):
        self._start = self._now()

    def on_step_end(self, args, state, control, **kwargs):
        self.seconds.append(self._now() - self._start)

    @staticmethod
    def _now() -> float:
        torch.cuda.synchronize()
        return time.perf_counter()


def models(name: str, device: torch.device):
    """Teacher, student and data; they are the same in every process."""
    size = MODELS[name]
    if name == "1b":
        torch.manual_seed(0)
        with torch.device(device):
            teacher = AutoModelForCausalLM.from_config(LlamaConfig(**ONE_B), dtype=torch.bfloat16).eval()
            student = convert_model(teacher, mixer="gka")
        rows = size["batch_size"] * max(size["steps"].values())
        tokens = torch.randint(
            0, ONE_B["vocab_size"], (rows * size["block_size"],), generator=torch.Generator().manual_seed(0)
        )
        return teacher, student, TokenBlocks(tokens, size["block_size"])
    teacher = load_model(asset_path("tiny_teacher"), torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(asset_path("tiny_teacher"))
    data = TokenBlocks.from_files(asset_path("train.txt"), tokenizer, size["block_size"])
    return teacher, convert_model(teacher, mixer="gka"), data


def work(name: str, accumulation: int, folder: Path) -> dict:
    """Run both stages of one model in this process of a launch. Returns the measurements of this process."""
    device = torch.device("cuda", local_rank())
    torch.cuda.set_device(device)
    teacher, student, data = models(name, device)
    record = {"parameters": student.num_parameters(), "stages": {}}
    for stage, count in MODELS[name]["steps"].items():
        timer = StepTimer()
        recipe = Recipe(
            stage=stage,
            steps=count,
            batch_size=MODELS[name]["batch_size"] // accumulation,
            gradient_accumulation=accumulation,
            block_size=MODELS[name]["block_size"],
            learning_rate=1e-3 if stage == "align" else 5e-4,
            rest_learning_rate=5e-5,
            warmup_steps=5,
            trainer={"disable_tqdm": True, "logging_steps": 1},
        )
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        result = train(student, teacher, data, folder / stage, recipe=recipe, callbacks=[timer])
        step = statistics.median(timer.seconds[min(WARM_UP, len(timer.seconds) - 1) :])
        record["stages"][stage] = {
            "steps": result["steps"],
            "tokens_per_step": recipe.tokens_per_step,
            "seconds_per_step": round(step, 5),
            "tokens_per_second": round(recipe.tokens_per_step / step),
            "peak_memory_bytes": torch.cuda.max_memory_allocated(),
            "loss": [round(entry["loss"], 6) for entry in result["log"]],
        }
    return record


def launcher_command(kind: str) -> list[str]:
    """The beginning of a command line: accelerate with the recipe's config file."""
    if kind == "single":
        return [sys.executable]
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(CONFIGS / f"{kind}.yaml")]
    return [*launcher, "--main_process_port", "0"]


def start(kind: str, names: list[str], folder: Path, gpu: int | None = None, accumulation: int = 1):
    """Start one launch that trains these models one by one and writes `folder/<name>_<kind>.json` for each."""
    title = "_".join([*names, kind]) + ("_accumulated" if accumulation > 1 else "")
    env = os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "4"), "TOKENIZERS_PARALLELISM": "false"}
    if gpu is not None:
        env["CUDA_VISIBLE_DEVICES"] = str(gpu)
    script = [str(Path(__file__).resolve()), "--worker", kind, "--accumulation", str(accumulation)]
    script += ["--folder", str(folder), *(part for name in names for part in ("--model", name))]
    log = (folder / f"{title}.log").open("w")
    began = time.perf_counter()
    process = subprocess.Popen([*launcher_command(kind), *script], env=env, stdout=log, stderr=log)
    return title, process, began


def finish(*launches) -> bool:
    """Wait for launches that run at the same time. Returns whether all of them exited with code 0."""
    codes = []
    for title, process, began in launches:
        codes.append(process.wait())
        print(f"{title}: {time.perf_counter() - began:.0f} s, exit {codes[-1]}", flush=True)
    return not any(codes)


def compare(results: dict) -> dict:
    """The scaling efficiency of each launch, and how far its losses are from those of one GPU, relatively."""
    summary = {}
    for model in {name.split("_")[0] for name in results}:
        if f"{model}_single" not in results:
            continue
        one = results[f"{model}_single"]["stages"]
        for name, result in results.items():
            if not name.startswith(f"{model}_") or name == f"{model}_single":
                continue
            for stage, row in result["stages"].items():
                pairs = zip(row["loss"], one[stage]["loss"], strict=True)
                entry = {"loss_difference": max(abs(a - b) / abs(b) for a, b in pairs)}
                if not name.endswith("accumulated"):
                    entry["scaling_efficiency"] = row["tokens_per_second"] / (2 * one[stage]["tokens_per_second"])
                summary[f"{name}_{stage}"] = {key: round(value, 6) for key, value in entry.items()}
    return summary


def main(
    out: Annotated[Path, typer.Option(help="the JSON file to write")] = Path(
        "training/experiments/several_gpus/results/multi_gpu.json"
    ),
    logs: Annotated[Path, typer.Option("--folder", help="folder of the records and logs of the launches")] = Path(
        "runs/multi_gpu"
    ),
    model: Annotated[list[str] | None, typer.Option(help="bundled or 1b; both by default")] = None,
    kind: Annotated[list[str] | None, typer.Option(help=f"beside one GPU: {', '.join(KINDS)}; all by default")] = None,
    worker: Annotated[str | None, typer.Option(hidden=True)] = None,
    accumulation: Annotated[int, typer.Option(hidden=True)] = 1,
) -> None:
    """Measure every launch and write one JSON."""
    logs.mkdir(parents=True, exist_ok=True)
    logs = logs.resolve()
    names = model or list(MODELS)
    if worker:
        for name in names:
            title = f"{name}_{worker}" + ("_accumulated" if accumulation > 1 else "")
            record = work(name, accumulation, logs / title)
            if is_first():
                write_json(logs / f"{title}.json", record)
        return
    kinds = kind or KINDS
    check_names("--kind", kinds, KINDS)
    # the launches on one GPU run at the same time, each on its own GPU
    first, *others = (start("single", [name], logs, gpu=i) for i, name in enumerate(names))
    succeeded = finish(first)
    if "halves" in kinds:
        others.append(start("single", names[:1], logs, gpu=0, accumulation=2))
    succeeded &= finish(*others)
    for launch in [name for name in kinds if name != "halves"]:
        succeeded &= finish(start(launch, names, logs))
    found = {path.stem: json.loads(path.read_text()) for path in sorted(logs.glob("*.json"))}
    table = environment() | {"gpus": torch.cuda.device_count(), "teacher": bundled_teacher()}
    table |= {"summary": compare(found), "launches": found}
    write_json(out, table)
    print(json.dumps(table["summary"], indent=1))
    if not succeeded:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
