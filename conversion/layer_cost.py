"""What a layer costs by its kind, attention or a mixer: bytes per sequence, and times that were measured on a GPU.

`layer_times.json` holds measured microseconds per token of one layer of each kind, in several sizes
(kernels/benchmarks/benchmark_layers.py). A layer of another size is estimated from them by

    us = a + b weight_bytes + c memory_bytes        a, b, c >= 0

with one fit per kind and phase, which minimises the relative error. Decoding is bound by memory traffic, and the work
of a prompt is proportional to the same two sizes. A memory and the window beside it run one after the other, so their
times add up. The times serve to compare mixtures of mixers, and they are those of
the machine in the file.
"""

import functools
import itertools
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedConfig

from hf_memmix.mixers import ATTENTION, BesideWindow
from hf_memmix.serving.footprint import layer_kv_bytes, state_bytes

TIMES = Path(__file__).with_name("layer_times.json")
PHASES = ("decode", "prefill")


@dataclass(frozen=True)
class LayerCost:
    """What one layer costs.

    Args:
        state_bytes: bytes per sequence: the states of a mixer, or the keys and values of the given context.
        decode_us: estimated microseconds per decoded token of one sequence.
        prefill_us: estimated microseconds per token of a prompt of the given context.
            Both times are None for a kind that was not measured, or with a window beside it if no window was.
    """

    state_bytes: int
    decode_us: float | None
    prefill_us: float | None

    def record(self) -> dict:
        return asdict(self)


def layer_cost(
    kind: str, module: nn.Module, config: PreTrainedConfig, layer: int, context: int, dtype: torch.dtype
) -> LayerCost:
    """The cost of one layer.

    Args:
        kind: "attention" or the name of a mixer.
        module: the attention or the mixer, also without values (on the meta device).
        config: configuration of the model in which `module` is layer `layer`.
        context: tokens in the cache of attention, and of the prompt.
        dtype: of weights and activations when the model is used.
    """
    if isinstance(module, BesideWindow):
        parts = ((kind, module.memory), ("window", module.window))
        return _sum(*(layer_cost(name, part, config, layer, context, dtype) for name, part in parts))
    attends = kind == ATTENTION
    memory = layer_kv_bytes(config, layer, context, dtype) if attends else state_bytes(module, dtype)
    fp32 = getattr(module, "fp32_parameters", ())
    weights = sum(p.numel() * (4 if name in fp32 else dtype.itemsize) for name, p in module.named_parameters())
    return LayerCost(memory, *(_estimate(kind, phase, weights, memory) for phase in PHASES))


def _sum(one: LayerCost, other: LayerCost) -> LayerCost:
    pairs = zip(one.record().values(), other.record().values(), strict=True)
    return LayerCost(*(None if None in pair else sum(pair) for pair in pairs))


def measured_kinds() -> list[str]:
    """The kinds of layers with measured times."""
    return list(dict.fromkeys(row["kind"] for row in _measured()["rows"]))


def measured_on() -> str:
    """The machine of the times."""
    return _measured()["device"]


@functools.cache
def _measured() -> dict:
    return json.loads(TIMES.read_text(encoding="utf-8"))


def _estimate(kind: str, phase: str, weight_bytes: int, memory_bytes: int) -> float | None:
    if kind not in measured_kinds():
        return None
    constant, per_weight, per_memory = coefficients(kind, phase)
    return constant + per_weight * weight_bytes + per_memory * memory_bytes


@functools.cache
def coefficients(kind: str, phase: str) -> tuple[float, float, float]:
    """a, b and c of a measured kind in a phase: microseconds, and microseconds per byte."""
    rows = [row for row in _measured()["rows"] if (row["kind"], row["phase"]) == (kind, phase)]
    features = [[1.0, row["weight_bytes"], row["B"] * row["memory_bytes"]] for row in rows]
    times = torch.tensor([row["us"] for row in rows], dtype=torch.float64)
    return _nonnegative_fit(torch.tensor(features, dtype=torch.float64) / times[:, None])


def _nonnegative_fit(features: torch.Tensor) -> tuple[float, ...]:
    """Coefficients >= 0 [F] with the least |features @ coefficients - 1|^2, for features [rows, F] of small F.

    The best fit is the unrestricted one of some subset of the features, so all subsets are tried.
    """
    width, best, lowest = features.shape[1], None, float("inf")
    size = features.abs().amax(0).clamp_min(1e-300)  # bytes and constants differ by many orders of magnitude
    ones = torch.ones(len(features), dtype=features.dtype)
    for count in range(1, width + 1):
        for subset in itertools.combinations(range(width), count):
            columns = list(subset)
            found = torch.linalg.lstsq(features[:, columns] / size[columns], ones, driver="gelsd").solution
            error = (features[:, columns] / size[columns] @ found - 1).square().sum().item()
            if (found >= 0).all() and error < lowest - 1e-12:
                lowest, best = error, dict(zip(columns, (found / size[columns]).tolist(), strict=True))
    return tuple(best.get(column, 0.0) for column in range(width))
