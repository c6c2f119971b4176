"""How close is each mixer to the attention that it replaces, before any training? Compares several initialisations.

    python training/experiments/conversion/starts.py --out init_table.json

A start is one initialisation of a mixer. Every layer of the bundled transformer is converted, and each mixer gets the
inputs that its attention gets in the teacher. The figure is |mixer - attention|^2 / |attention|^2 per layer; an output
of zero gives 1. Starts are chosen on the development text, and the held-out text is used for the reported figures.
"default" is the initialisation of `convert_model`; each other start differs from it as its name says. Every start can
be trained: no output gate is below 0.1, because a smaller gate makes the gradients small, and each mixer has a head or
a state with a half-life of at least 16 tokens.

Then the default and the starts of each mixer with the lowest error on the development text are aligned for a few
steps, with the same recipe.
"""

import math
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Annotated

import torch
import torch.nn.functional as F
import typer
from torch import nn
from transformers import AutoModelForCausalLM

from hf_memmix.assets import asset_path
from hf_memmix.conversion import convert_model, load_model
from hf_memmix.conversion.compare import layer_errors
from hf_memmix.conversion.families import attention_module
from hf_memmix.conversion.from_attention.coffee import start_states
from hf_memmix.conversion.from_attention.gka import start_decay
from hf_memmix.conversion.from_attention.lattice import scale_values
from hf_memmix.training.data import TokenBlocks
from hf_memmix.training.experiments.bundled.versions import bundled_teacher
from hf_memmix.training.experiments.common import baselines  # noqa: F401, registers "gla"
from hf_memmix.training.experiments.common.harness import Experiment, device
from hf_memmix.training.experiments.common.options import MeasuredTokens, Options, check_names
from hf_memmix.training.experiments.common.text import measured_tokens as tokens_of
from hf_memmix.training.text_files import text_record
from hf_memmix.training.train import align

DEFAULT = "default"
Change = Callable[[nn.Module], object]


@dataclass(frozen=True)
class Start:
    """One initialisation of a mixer.

    options: options of the mixer that differ from those of a conversion.
    fresh: names of parameters or modules of the mixer that keep the values of an untrained model.
    changes: functions that change the parameters of every mixer after the conversion.
    """

    options: dict = field(default_factory=dict)
    fresh: tuple[str, ...] = ()
    changes: tuple[Change, ...] = ()


def options(**values) -> Start:
    return Start(options=values)


def changed(*changes: Change, **values) -> Start:
    return Start(values, changes=changes)


def sigmoid_bias(value: float, name: str) -> Change:
    """Set the bias of the projection `name` so that its sigmoid starts at `value`."""
    return lambda mixer: getattr(mixer, name).bias.fill_(math.log(value / (1 - value)))


def gate(value: float) -> Change:
    """Set the bias of the output gate so that the gate starts at `value`."""

    def fill(mixer):
        activation = F.gelu if mixer.name == "lattice" else F.silu
        biases = torch.linspace(0, 10, 100_001)
        projection = mixer.z_proj if mixer.name == "coffee" else mixer.g_proj
        projection.bias.fill_(biases[(activation(biases) - value).abs().argmin()].item())

    return fill


def half_lives(low: float, high: float) -> Change:
    return partial(start_decay, half_lives=(low, high))


def time_scales(low: float, high: float) -> Change:
    return partial(start_states, time_scales=(low, high))


def values_of_size(size: float) -> Change:
    return partial(scale_values, size=size)


def eta(value: float) -> Change:
    return lambda mixer: mixer.eta.fill_(value)


# initialised as in an untrained model
CONVOLUTIONS = Start(fresh=("q_conv1d", "k_conv1d", "v_conv1d", "u_conv1d"))
GATES = Start(fresh=("a_proj", "A_log", "dt_bias", "b_proj", "alpha_proj", "g_proj"))

GATED_MEMORY = {
    DEFAULT: Start(),
    "random convolutions": CONVOLUTIONS,
    "random gates": GATES,
    "SiLU after the convolutions": options(conv_activation="silu"),
    "no rotary embedding": options(use_rope=False),
    "half-lives 1 to 64": changed(half_lives(1, 64)),
    "half-lives 1 to 256": changed(half_lives(1, 256)),
    "half-lives 4 to 64": changed(half_lives(4, 64)),
} | {f"beta {value:g}": changed(sigmoid_bias(value, "b_proj")) for value in (0.25, 0.75)}

STARTS: dict[str, dict[str, Start]] = {
    "gka": GATED_MEMORY
    | {f"alpha {value:g}": changed(sigmoid_bias(value, "alpha_proj")) for value in (0.25, 0.75, 0.9)}
    | {f"ridge {value:g}": options(ridge=value) for value in (0.005, 0.02, 0.1)}
    | {f"gate {value:g}": changed(gate(value)) for value in (0.2, 0.3, 1.0)}
    | {"half-lives 1 to 64, ridge 0.02, gate 0.3": changed(half_lives(1, 64), gate(0.3), ridge=0.02)},
    "ska": {
        DEFAULT: Start(),
        "orthogonal queries and keys": Start(fresh=("q_proj", "k_proj")),
        "rank 16": options(rank=16),
        "K = 0": options(power=0),
        "K = 1": options(power=1),
        "chunks of 16": options(chunk_size=16),
    }
    | {
        f"eps {eps:g}, eta {value:g}": changed(eta(value), eps=eps)
        for eps in (1e-3, 0.1, 1.0)
        for value in (0.1, 0.3, 0.5, 1.5)
        if (eps, value) != (1.0, 0.5)  # the default
    },
    "lattice": {
        DEFAULT: Start(),
        "random convolutions": CONVOLUTIONS,
        "random step and gate": Start(fresh=("gamma_proj", "g_proj")),
        "SiLU after the convolutions": options(conv_activation="silu"),
        "no rotary embedding": options(use_rope=False),
        "forget gate": options(use_forget_gate=True),
    }
    | {f"step {value:g}": changed(sigmoid_bias(value, "gamma_proj")) for value in (0.1, 0.25, 0.75, 0.9)}
    | {f"gate {value:g}": changed(gate(value)) for value in (0.1, 0.2, 0.5)}
    | {f"values of size {value:g}": changed(values_of_size(value)) for value in (2, 5, 20, 50)},
    "coffee": {
        DEFAULT: Start(),
        "random convolutions": CONVOLUTIONS,
        "random feedback": Start(fresh=("w",)),
        "random states": Start(fresh=("lam_logit", "w", "C")),
        "SiLU after the convolutions": options(conv_activation="silu"),
    }
    | {f"gate {value:g}": changed(gate(value)) for value in (0.25, 0.5, 1.0)}
    | {"time scales 1 to 64, gate 1": changed(time_scales(1, 64), gate(1.0))}
    | {
        f"time scales {low} to {high}": changed(time_scales(low, high))
        for low, high in ((1, 16), (1, 64), (1, 256), (4, 64), (4, 256), (16, 256))
    },
    "gla": GATED_MEMORY | {f"gate {value:g}": changed(gate(value)) for value in (0.3, 0.5, 2.0)},
}


@torch.no_grad()
def build(teacher: nn.Module, mixer: str, start: Start, seed: int) -> nn.Module:
    """A student in which every layer of the teacher is converted."""
    student = convert_model(teacher, mixer, "none", seed=seed, **start.options)
    if start.fresh:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            scratch = dict(AutoModelForCausalLM.from_config(student.config).named_parameters())
    for layer in student.config.memory_layers:
        module = attention_module(student, layer)
        for change in start.changes:
            change(module)
    for name, parameter in student.named_parameters():
        if set(start.fresh) & set(name.split(".")):
            parameter.copy_(scratch[name])
    return student


def is_random(mixer: str, start: Start) -> bool:
    """Whether the start depends on the seed: Lattice draws its initial slots, and `fresh` parameters are drawn."""
    return mixer == "lattice" or bool(start.fresh)


def mean_error(rows: list[dict], mixer: str, start: str, key: str = "dev") -> float:
    """Mean over layers and seeds of the error on the text `key`, "dev" or "heldout"; infinite if no row has it."""
    found = [row for row in rows if (row["mixer"], row["start"]) == (mixer, start) and key in row]
    return statistics.fmean(statistics.fmean(row[key]) for row in found) if found else math.inf


def rows_to_run(done: list[dict], args) -> list[dict]:
    """Rows for all starts; when all starts of a mixer are measured, also rows that align the best `contenders`."""
    rows = []
    for mixer in args.mixers:
        starts = STARTS[mixer]
        own = [
            {"mixer": mixer, "start": name, "seed": seed, "steps": 0}
            for name, start in starts.items()
            for seed in range(args.seeds if is_random(mixer, start) else 1)
        ]
        rows += own
        measured = [row for row in done if row["mixer"] == mixer and row["steps"] == 0]
        if args.steps and len(measured) == len(own):
            closest = sorted(starts, key=lambda name: mean_error(measured, mixer, name))[: args.contenders]
            rows += [
                {"mixer": mixer, "start": name, "seed": 0, "steps": args.steps}
                for name in dict.fromkeys((DEFAULT, *closest))
            ]
    return rows


@cache
def teacher() -> nn.Module:
    return load_model(asset_path("tiny_teacher"), dtype=torch.float32).to(device())


def run(row: dict, args) -> dict:
    student = build(teacher(), row["mixer"], STARTS[row["mixer"]][row["start"]], row["seed"])
    if row["steps"]:
        data = TokenBlocks(tokens_of("train"), args.block_size // 2)
        with tempfile.TemporaryDirectory() as scratch:
            recipe = {"steps": row["steps"], "batch_size": 4, "block_size": args.block_size // 2}
            recipe |= {"learning_rate": 3e-3, "warmup_steps": 1 + row["steps"] // 6, "save_every": 0}
            align(student, teacher(), data, scratch, trainer={"disable_tqdm": True}, **recipe)
    return {
        name: [round(error, 4) for error in errors_on(name, student, args).values()] for name in ("dev", "heldout")
    }


def errors_on(text: str, student: nn.Module, args) -> dict[int, float]:
    tokens = tokens_of(text)[: args.measured_tokens]
    return layer_errors(student, teacher(), tokens, block_size=args.block_size)


class StartsOptions(Options):
    mixers: Annotated[list[str], typer.Option(help="repeatable")] = tuple(STARTS)
    seeds: Annotated[int, typer.Option(help="number of seeds of starts that are random")] = 3
    measured_tokens: MeasuredTokens = 4096
    block_size: int = 512
    contenders: Annotated[
        int, typer.Option(help="number of starts per mixer, those of the lowest error, that are also aligned")
    ] = 2
    steps: Annotated[int, typer.Option(help="steps of align, with 4 rows of half a block each")] = 24


def about(args) -> dict:
    texts = {name: {"text": text_record(asset_path(f"{name}.txt"))} for name in ("dev", "heldout")}
    return {"teacher": bundled_teacher()} | texts


main = Experiment(
    "init_table",
    __file__,
    StartsOptions,
    rows_to_run,
    lambda args: check_names("--mixers", args.mixers, STARTS),
    about,
).command()


if __name__ == "__main__":
    typer.run(main)
