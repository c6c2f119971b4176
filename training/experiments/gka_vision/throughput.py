"""Images per second of GKAVision-T, its backbone with other mixers, and a ViT with SDPA, from 224 to 1024 pixels.

    python training/experiments/gka_vision/throughput.py --out throughput.json

All models have the parameters of the preset "tiny" (`models.py`) and random weights in bf16. A batch has about as many
pixels at every resolution. On a GPU, each measured call is one CUDA graph, timed by events, and attention runs by the
backend of `scaled_dot_product_attention` that is the fastest for the model and the resolution (`SDPA`). PyTorch's own
choice needs as much memory for the ViT as its attention matrices: during a capture transformers 5.17 gives it a full
mask, which no fused kernel takes. With such a kernel the capture fails, and the calls run without a graph.
"""

import contextlib
import statistics
import time
from collections.abc import Callable
from typing import Annotated

import torch
import typer
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from hf_memmix.swap import fp32_parameter_names
from hf_memmix.training.experiments.common.graphs import GraphedFunction
from hf_memmix.training.experiments.common.harness import Experiment, device
from hf_memmix.training.experiments.common.options import Models, Options, check_names
from hf_memmix.training.experiments.gka_vision.models import MODELS, SMALL, TINY_PRESET, build

SIZES = {"tiny": TINY_PRESET, "small": SMALL}
# None: PyTorch chooses
SDPA = {"default": None, "flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


def seconds_per_call(call: Callable[[], object], args) -> float:
    """The median of `args.repeats` times of `args.calls` calls, divided by `args.calls`."""
    times = []
    for _ in range(args.repeats):
        if device().type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(args.calls):
                call()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1000)
        else:
            began = time.perf_counter()
            for _ in range(args.calls):
                call()
            times.append(time.perf_counter() - began)
    return statistics.median(times) / args.calls


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


def run(row: dict, args) -> dict:
    """Images per second of one model at one resolution."""
    resolution = row["resolution"]
    batch = max(1, round(args.batch_at_224 * (224 / resolution) ** 2))
    common = {"image_size": resolution, "num_channels": 3, "num_labels": 1000}
    dtype = torch.bfloat16 if device().type == "cuda" else torch.float32
    model = cast(build(row["model"], SIZES[args.size], 0, **common).to(device()), dtype)
    images = torch.randn(batch, 3, resolution, resolution, device=device(), dtype=dtype)
    found, speeds = {"batch": batch, "parameters": model.num_parameters()}, {}
    for backend in SDPA if device().type == "cuda" else ["default"]:
        with contextlib.suppress(RuntimeError), attention_by(backend):  # not every backend takes every shape
            speeds[backend] = round(batch / seconds_per_call(inference(model, images), args), 1)
    fastest = max(speeds, key=speeds.get, default="default")
    found |= {"sdpa": fastest, "images_per_second_by_sdpa": speeds}
    for what, make in (("inference", inference), ("training", training)):
        if device().type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        try:
            with attention_by(fastest):
                found[f"{what}_images_per_second"] = round(batch / seconds_per_call(make(model, images), args), 1)
        except torch.cuda.OutOfMemoryError as error:
            found[f"{what}_error"] = str(error).splitlines()[0]
        if device().type == "cuda":
            found[f"{what}_peak_bytes"] = torch.cuda.max_memory_allocated()
    return found


def rows_to_run(done: list[dict], args) -> list[dict]:
    return [{"model": name, "resolution": size} for size in args.resolutions for name in args.models]


class ThroughputOptions(Options):
    size: Annotated[str, typer.Option(help="sizes of the models: tiny or small")] = "tiny"
    models: Models = MODELS
    resolutions: Annotated[list[int], typer.Option(help="pixels; repeatable")] = (224, 384, 512, 768, 1024)
    batch_at_224: Annotated[int, typer.Option(help="images of 224 x 224 pixels; fewer at larger resolutions")] = 256
    calls: Annotated[int, typer.Option(help="calls per measured time")] = 10
    repeats: Annotated[int, typer.Option(help="measured times, of which the median counts")] = 5


def check(args) -> None:
    check_names("--models", args.models, MODELS)
    check_names("--size", [args.size], SIZES)


main = Experiment("gka_vision_throughput", __file__, ThroughputOptions, rows_to_run, check).command()


if __name__ == "__main__":
    typer.run(main)
