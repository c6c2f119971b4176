"""Measures memory and speed of training steps of shapes of 135M, 1B and 8B, beside what `memmix plan` computes.

    python training/experiments/budget/measure_training.py --out training/experiments/budget/results/training_h200.json

Models are Llama shapes with random weights, made on the GPU; every layer has the mixer gka. A step is forward,
backward, clipping and AdamW of the pair that `align` and `distill` train, without the Trainer around it. The peak
memory is that of the last steps, of PyTorch's allocator: allocated tensors, and what it has reserved. Tokens per
second is a median; `kernel_ms` is the time of all GPU kernels of a step, and `ms` that of the step. A row that does
not fit is recorded with its error. `--tiny` runs small shapes, also on a CPU.
"""

import argparse
import faulthandler
import gc
import json
import statistics
import time
from dataclasses import asdict
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainingArguments

from hf_memmix.conversion import convert_model
from hf_memmix.conversion.families import attention_module
from hf_memmix.conversion.records import environment, write_json
from hf_memmix.training.experiments.common.llamas import DISTILLED, SHAPES, SMALL
from hf_memmix.training.groups import freeze_by_rate, optimizer_groups
from hf_memmix.training.planning.memory import Settings, memory_of
from hf_memmix.training.planning.shapes import Shapes
from hf_memmix.training.recipe import Recipe
from hf_memmix.training.train import in_training_dtype, make_pair

TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
TINY |= {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 256}
SIZES = {"135M": SMALL.fields, "1.2B": DISTILLED.fields, "8.0B": SHAPES[-1].fields, "tiny": TINY}
LORA = {"teacher": "lora", "lora_mixers": True, "checkpointing": True}
# name of the row, size, settings
RUNS = (
    ("135M full", "135M", Settings("distill", rows=8, length=2048)),
    ("135M LoRA", "135M", Settings("distill", rows=8, length=2048, **LORA)),
    ("135M align", "135M", Settings("align", rows=8, length=2048)),
    ("1B full", "1.2B", Settings("distill", rows=4, length=2048)),
    ("1B full, checkpointing", "1.2B", Settings("distill", rows=4, length=2048, checkpointing=True)),
    ("1B LoRA", "1.2B", Settings("distill", rows=4, length=2048, **LORA)),
    ("1B align", "1.2B", Settings("align", rows=4, length=2048)),
    ("1B align, checkpointing", "1.2B", Settings("align", rows=4, length=2048, checkpointing=True)),
    ("8B LoRA", "8.0B", Settings("distill", rows=1, length=2048, chunk_tokens=512, **LORA)),
    ("8B LoRA, four rows", "8.0B", Settings("distill", rows=4, length=2048, chunk_tokens=512, **LORA)),
    ("8B align, checkpointing", "8.0B", Settings("align", rows=1, length=2048, checkpointing=True)),
    ("8B QLoRA", "8.0B", Settings("distill", rows=1, length=2048, chunk_tokens=512, quantize="4bit", **LORA)),
    (
        "8B QLoRA, paged AdamW",
        "8.0B",
        Settings(
            "distill",
            rows=1,
            length=2048,
            chunk_tokens=512,
            quantize="4bit",
            optimizer="paged_adamw_8bit",
            **LORA,
        ),
    ),
    ("8B LoRA of int8", "8.0B", Settings("distill", rows=1, length=2048, chunk_tokens=512, quantize="8bit", **LORA)),
    ("1B full, AdamW in 8 bit", "1.2B", Settings("distill", rows=4, length=2048, optimizer="adamw_bnb_8bit")),
    ("1B full, paged AdamW", "1.2B", Settings("distill", rows=4, length=2048, optimizer="paged_adamw_8bit")),
)
STEPS, UNTIMED = 6, 2


def meta_pair(fields: dict) -> tuple[nn.Module, nn.Module]:
    """Teacher in bf16 and student on the meta device."""
    with torch.device("meta"):
        teacher = AutoModelForCausalLM.from_config(LlamaConfig(**fields), dtype=torch.bfloat16)
    return teacher.eval(), convert_model(teacher, "gka")


def materialise(teacher: nn.Module, student: nn.Module, device: torch.device) -> None:
    """Give a pair on the meta device random weights on a device; what both have in common is equal."""
    torch.manual_seed(0)
    for model in (student, teacher):
        model.to_empty(device=device)
        model.tie_weights()
        for module in model.modules():
            if hasattr(module, "inv_freq"):  # angles are computed when a rotary embedding is made
                with torch.device(device):
                    fresh = type(module)(model.config)
                for name, value in fresh.named_buffers():
                    setattr(module, name, value)
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                nn.init.ones_(parameter)
            elif parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)
            else:
                nn.init.zeros_(parameter)
    ours = dict(student.named_parameters())
    with torch.no_grad():
        for name, parameter in teacher.named_parameters():
            if name in ours and ours[name].shape == parameter.shape and "self_attn" not in name:
                parameter.copy_(ours[name])


def prepared(teacher: nn.Module, student: nn.Module, settings: Settings, cuda: bool):
    """The pair that the stage trains, and its optimizer."""
    recipe = Recipe(
        stage=settings.stage,
        batch_size=settings.rows,
        block_size=settings.length,
        rest_learning_rate=1e-5,
        teacher=settings.teacher,
        lora_rank=settings.lora_rank,
        lora_mixers=settings.lora_mixers,
        quantize=settings.quantize,
        chunk_tokens=settings.chunk_tokens,
        gradient_checkpointing=settings.checkpointing,
        bf16=cuda,
    )
    if settings.stage == "align":  # only its mixers are moved to the GPU and trained in fp32
        for layer in student.config.memory_layers:
            attention_module(student, layer).float()
        pair = make_pair(student.train(), teacher, recipe)
        keep = {id(parameter) for parameter in pair.parameters()}
        for name, parameter in student.named_parameters():
            if id(parameter) not in keep and "embed_tokens" not in name:
                parameter.data = parameter.data.new_empty(0)  # a slice would keep the memory
        # the trainer's student is fp32, which the mixers' inputs follow
        embeddings = student.get_input_embeddings().weight
        embeddings.data = embeddings.data[:1].float()
    else:
        pair = make_pair(in_training_dtype(student, recipe).train(), teacher, recipe)
    rates = freeze_by_rate(student, recipe)
    groups = optimizer_groups(student, list(pair.parameters()), rates)
    kind, options = Trainer.get_optimizer_cls_and_kwargs(TrainingArguments("unused", optim=settings.optimizer))
    return pair, kind(groups, **options)


def measure(name: str, size: str, settings: Settings, device: torch.device) -> dict:
    """One row: what was measured, and what the arithmetic gives for the same run."""
    cuda = device.type == "cuda"
    row = {"run": name, "shape": size, "settings": asdict(settings)}
    teacher, student = meta_pair(SIZES[size])
    row["predicted"] = asdict(memory_of(shapes := Shapes.of(teacher, student), settings))
    row["predicted_bytes"] = sum(row["predicted"].values())
    row["parameters"] = shapes.teacher
    materialise(teacher, student, device)
    pair, optimizer = prepared(teacher, student, settings, cuda)
    del teacher, student
    gc.collect()
    if cuda:
        torch.cuda.empty_cache()
        row["weights_bytes"] = torch.cuda.memory_allocated()
    tokens = torch.randint(3, SIZES[size]["vocab_size"], (settings.rows, settings.length), device=device)
    trained = [parameter for parameter in pair.parameters() if parameter.requires_grad]
    seconds = []
    for step in range(STEPS):
        if cuda and step == UNTIMED:
            torch.cuda.reset_peak_memory_stats()
        start = _now(cuda)
        loss = step_of(pair, tokens, trained, optimizer)
        seconds.append(_now(cuda) - start)
    row |= {"loss": loss.item(), "tokens_s": round(settings.tokens / statistics.median(seconds[UNTIMED:]))}
    if cuda:
        row |= {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
        row["ratio"] = round(row["predicted_bytes"] / row["allocated"], 3)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            step_of(pair, tokens, trained, optimizer)
            torch.cuda.synchronize()
        row["kernel_ms"] = round(sum(event.self_device_time_total for event in profiler.key_averages()) / 1e3, 1)
        row["ms"] = round(statistics.median(seconds[UNTIMED:]) * 1e3, 1)
    return row


def step_of(pair, tokens, trained, optimizer):
    """One step of training. Returns the loss."""
    loss = pair(tokens)["loss"]
    loss.backward()
    nn.utils.clip_grad_norm_(trained, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def chosen(only: str) -> list[tuple]:
    """The run of this name; without one, all runs whose names begin so."""
    return [run for run in RUNS if run[0] == only] or [run for run in RUNS if run[0].startswith(only)]


def _now(cuda: bool) -> float:
    if cuda:
        torch.cuda.synchronize()
    return time.perf_counter()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tiny", action="store_true", help="small shapes, to try the script")
    parser.add_argument("--seconds", type=float, default=100.0, help="begin no further row after so many seconds")
    parser.add_argument(
        "--only",
        action="append",
        help="only the run of this name, or all whose names begin so; may be given again, they run in this order",
    )
    args = parser.parse_args()
    faulthandler.dump_traceback_later(args.seconds, repeat=True)  # where a row stands that takes longer
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    begin, rows = time.perf_counter(), {}
    if args.out.exists():  # rows that are not measured now stay
        rows = {row["run"]: row for row in json.loads(args.out.read_text())["rows"]}
    for name, size, settings in [run for only in args.only or [""] for run in chosen(only)]:
        print(f"{time.perf_counter() - begin:.0f} s: {name}", flush=True)
        if time.perf_counter() - begin > args.seconds:
            print(f"no time left for {name}", flush=True)
            continue
        if args.tiny:
            size, settings = "tiny", Settings(**asdict(settings) | {"length": 64, "chunk_tokens": 32})
        try:
            row = measure(name, size, settings, device)
        except (RuntimeError, ValueError, ImportError) as error:  # also without memory: torch.OutOfMemoryError
            told = str(error).strip().splitlines()[0]
            row = {"run": name, "shape": size, "settings": asdict(settings), "error": told}
        rows[name] = row | {"environment": environment(device)}
        shown = ("run", "tokens_s", "ms", "kernel_ms", "ratio", "allocated", "reserved", "error")
        print(json.dumps({key: row[key] for key in shown if key in row}), flush=True)
        write_json(args.out, {"rows": [rows[name] for name, *_ in RUNS if name in rows]})
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
