"""Images per second of GKAVision-T, its backbone with other mixers, and a ViT with SDPA, from 224 to 1024 pixels.

    python training/experiments/gka_vision/throughput.py --out throughput.json

All models have the parameters of the preset "tiny" (`models.py`) and random weights in bf16. A batch has about as many
pixels at every resolution. On a GPU, each measured call is one CUDA graph, timed by events, and attention runs by the
backend of `scaled_dot_product_attention` that is the fastest for the model and the resolution (`SDPA`). PyTorch's own
choice needs as much memory for the ViT as its attention matrices: during a capture transformers 5.17 gives it a full
mask, which no fused kernel takes. With such a kernel the capture fails, and the calls run without a graph.
"""

import contextlib
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from hf_memmix.command_options import command
from hf_memmix.conversion.records import environment, write_json
from hf_memmix.swap import fp32_parameter_names
from hf_memmix.training.experiments.common.graphs import GraphedFunction
from hf_memmix.training.experiments.common.harness import device
from hf_memmix.training.experiments.common.options import check_names
from hf_memmix.training.experiments.gka_vision.models import MODELS, SMALL, TINY_PRESET, build

SIZES = {"tiny": TINY_PRESET, "small": SMALL}
REPEATS = 5
# None: PyTorch chooses
SDPA = {"default": None, "flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


def seconds_per_call(call: Callable[[], object], calls: int) -> float:
    """The median of `REPEATS` times of `calls` calls, divided by `calls`."""
    times = []
    for _ in range(REPEATS):
        if device().type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(calls):
                call()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1000)
        else:
            began = time.perf_counter()
            for _ in range(calls):
                call()
            times.append(time.perf_counter() - began)
    return statistics.median(times) / calls


def inference(model: nn.Module, images: torch.Tensor) -> Callable[[], object]:
    model.eval()

    def forward(x):
        with torch.no_grad():
            return model(x).logits

    return repeated(forward, images)


def training(model: nn.Module, images: torch.Tensor) -> Callable[[], object]:
    """Forward and backward, without the optimizer."""
    model.train()

    def forward_and_backward(x):
        model.zero_grad()
        loss = model(x).logits.float().square().mean()
        loss.backward()
        return loss.detach()

    return repeated(forward_and_backward, images)


def repeated(function: Callable, images: torch.Tensor) -> Callable[[], object]:
    graphed = GraphedFunction(function) if device().type == "cuda" else function
    for _ in range(5 if device().type == "cuda" else 1):  # compile and capture
        graphed(images)
    return lambda: graphed(images)


def cast(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The model in `dtype`, with the parameters in fp32 that `from_pretrained(dtype=...)` leaves in fp32."""
    kept = {name: model.get_parameter(name).data for name in fp32_parameter_names(model)}
    model.to(dtype)
    for name, parameter in kept.items():
        model.get_parameter(name).data = parameter
    return model


def attention_by(name: str):
    """A context in which `scaled_dot_product_attention` uses a backend of `SDPA`."""
    return contextlib.nullcontext() if SDPA[name] is None else sdpa_kernel(SDPA[name])


def measure(name: str, sizes: dict, resolution: int, batch: int, calls: int) -> dict:
    """Images per second of one model at one resolution."""
    common = {"image_size": resolution, "num_channels": 3, "num_labels": 1000}
    dtype = torch.bfloat16 if device().type == "cuda" else torch.float32
    model = cast(build(name, sizes, 0, **common).to(device()), dtype)
    images = torch.randn(batch, 3, resolution, resolution, device=device(), dtype=dtype)
    row = {"model": name, "resolution": resolution, "batch": batch, "parameters": model.num_parameters()}
    speeds = {}
    for backend in SDPA if device().type == "cuda" else ["default"]:
        with contextlib.suppress(RuntimeError), attention_by(backend):  # not every backend takes every shape
            speeds[backend] = round(batch / seconds_per_call(inference(model, images), calls), 1)
    fastest = max(speeds, key=speeds.get, default="default")
    row |= {"sdpa": fastest, "images_per_second_by_sdpa": speeds}
    for what, make in (("inference", inference), ("training", training)):
        if device().type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        try:
            with attention_by(fastest):
                row[f"{what}_images_per_second"] = round(batch / seconds_per_call(make(model, images), calls), 1)
        except torch.cuda.OutOfMemoryError as error:
            row[f"{what}_error"] = str(error).splitlines()[0]
        if device().type == "cuda":
            row[f"{what}_peak_bytes"] = torch.cuda.max_memory_allocated()
    return row


def measured_rows(path: Path, settings: dict) -> list[dict]:
    """The rows that the file holds; none if there is no file.

    Raises:
        ValueError: they were measured with other settings.
    """
    if not path.exists():
        return []
    found = json.loads(path.read_text())
    if found["settings"] != settings:
        raise ValueError(f"{path} was measured with {found['settings']}, not with {settings}; choose another --out")
    return found["rows"]


class ThroughputOptions:
    out: Annotated[Path, typer.Option(help="the JSON file to write")]
    size: Annotated[str, typer.Option(help="sizes of the models: tiny or small")] = "tiny"
    models: Annotated[list[str], typer.Option(help="models to measure; repeatable")] = MODELS
    resolutions: Annotated[list[int], typer.Option(help="pixels; repeatable")] = (224, 384, 512, 768, 1024)
    batch: Annotated[int, typer.Option(help="images of 224 x 224 pixels; fewer at larger resolutions")] = 256
    calls: Annotated[int, typer.Option(help="calls per measured time")] = 10
    seconds: Annotated[float, typer.Option(help="time limit; the same command measures the rest later")] = float("inf")


@command(ThroughputOptions)
def main(args) -> None:
    """Measure all models at all resolutions; the file is written after each."""
    check_names("--models", args.models, MODELS)
    check_names("--size", [args.size], SIZES)
    began, settings = time.time(), {"size": args.size, "batch_at_224": args.batch, "calls": args.calls}
    settings["repeats"] = REPEATS
    rows = measured_rows(args.out, settings)
    known = {(row["model"], row["resolution"]) for row in rows}
    for resolution in args.resolutions:
        for name in args.models:
            if (name, resolution) in known:
                continue
            if time.time() - began > args.seconds:
                return
            images = max(1, round(args.batch * (224 / resolution) ** 2))
            rows.append(measure(name, SIZES[args.size], resolution, images, args.calls))
            print(rows[-1], flush=True)
            about = {"experiment": "gka_vision_throughput", "environment": environment()}
            write_json(args.out, about | {"settings": settings, "rows": rows})


if __name__ == "__main__":
    typer.run(main)
