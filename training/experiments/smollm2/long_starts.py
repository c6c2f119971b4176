"""How far is each mixer from the attention that it replaces, before any training, by how long its memory lasts?

    python training/experiments/smollm2/long_starts.py --teacher SMOLLM2 --out long_starts.json

The error of a layer is |mixer - attention|^2 / |attention|^2 on the inputs that the layer has in the transformer. A
row is one mixer with half-lives in tokens, or with its own ones, or a window with some first tokens (`sinks`).
"former" undoes what a start does about the size of a memory's output: see `FORMER`.
"""

import functools
import math
from pathlib import Path
from typing import Annotated

import torch
import typer
from transformers import AutoTokenizer

from hf_memmix.assets import asset_path
from hf_memmix.conversion import convert_model, load_model
from hf_memmix.conversion.families import attention_module
from hf_memmix.conversion.from_attention import STARTS
from hf_memmix.conversion.records import markdown_table
from hf_memmix.mixers import MIXERS
from hf_memmix.training.data import tokenize_files
from hf_memmix.training.experiments.common.harness import Experiment, device, measured_at
from hf_memmix.training.experiments.common.options import Models, Options, check_names
from hf_memmix.training.experiments.smollm2.measuring import model_record
from hf_memmix.training.text_files import text_record

WINDOWS = ((64, 0), (64, 1), (64, 4), (384, 0), (384, 1))  # tokens and sinks
HALF_LIVES = (None, [64, 64], [256, 256], [2048, 2048], [64, 2048])


def _former_gka(mixer) -> None:
    mixer.alpha_proj.bias.zero_()
    mixer.g_proj.bias.fill_(0.7388)  # silu of it is 1/2


# the starts without measures against long memories: blends and gates of short ones, values four times as large
FORMER = {
    "gka": _former_gka,
    "gated_delta": lambda mixer: mixer.g_proj.bias.fill_(1.0206),
    "kda": lambda mixer: mixer.g_b_proj.bias.fill_(math.log(3)),
    "mamba2": lambda mixer: mixer.norm.weight.mul_(4),
    "lattice": lambda mixer: mixer.g_proj.bias.fill_(0.46),
}


def rows_to_run(done: list[dict], args) -> list[dict]:
    decaying = [name for name in args.models if hasattr(MIXERS[name].options_class(), "half_lives")]
    windows = [{"mixer": "window", "window": size, "sinks": sinks} for size, sinks in WINDOWS]
    return windows + [
        {"mixer": m, "half_lives": h} for h in HALF_LIVES for m in (args.models if h is None else decaying)
    ]


def run(row: dict, args) -> dict:
    teacher, layers = recorded(args.teacher, args.text, args.length, args.measured_tokens, args.every)
    student = convert_model(teacher, row["mixer"], **{name: value for name, value in row.items() if name != "mixer"})
    errors = {"errors_at_start": errors_of(student, layers)}
    if row["mixer"] in FORMER:
        with torch.no_grad():
            for layer in layers:
                FORMER[row["mixer"]](attention_module(student, layer))
        errors["former_errors"] = errors_of(student, layers)
    return errors


@functools.cache
def recorded(folder: Path, text: Path, length: int, tokens: int, every: int):
    """The transformer, and of every so many layers the inputs, the rotary embeddings and the attention's outputs."""
    teacher = load_model(folder, dtype=torch.float32).to(device())
    found = torch.as_tensor(tokenize_files(text, AutoTokenizer.from_pretrained(folder))[:tokens]).long()
    layers, handles = {}, []
    for layer in range(0, teacher.config.num_hidden_layers, every):

        def record(module, args, kwargs, output, layer=layer):
            layers[layer] = kwargs["hidden_states"], kwargs["position_embeddings"], output[0]

        handles.append(attention_module(teacher, layer).register_forward_hook(record, with_kwargs=True))
    with torch.no_grad():
        teacher.base_model(found.view(-1, length).to(device()), use_cache=False)
    for handle in handles:
        handle.remove()
    return teacher, layers


@torch.no_grad()
def errors_of(student, layers: dict) -> list[float]:
    """The error of each recorded layer."""
    errors = []
    for layer, (x, rotary, wanted) in layers.items():
        found = attention_module(student, layer)(x, position_embeddings=rotary)[0]
        errors.append(round(((found - wanted).square().sum() / wanted.square().sum()).item(), 4))
    return errors


def table(results: dict) -> str:
    """A table of mixers by half-lives, and one of windows by size and first tokens; former errors in brackets."""
    of_mixers, largest, of_windows = {}, {}, []
    for row in results["rows"]:
        errors, former = row["errors_at_start"], row.get("former_errors")
        mean = f"{sum(errors) / len(errors):.3f}"
        if "window" in row:
            of_windows.append([row["window"], row["sinks"], mean, f"{max(errors):.2f}"])
            continue
        before = "" if former is None else f" ({sum(former) / len(former):.2f})"
        of_mixers.setdefault(row["mixer"], {})[str(row["half_lives"])] = mean + before
        largest[row["mixer"]] = max(largest.get(row["mixer"], 0), *errors)
    lines = [
        [mixer, *(cells.get(str(lives), "") for lives in HALF_LIVES), f"{largest[mixer]:.2f}"]
        for mixer, cells in of_mixers.items()
    ]
    every, tokens, length = (results["settings"][name] for name in ("every", "measured_tokens", "length"))
    which = "All" if every == 1 else f"Every {every}th of the"
    note = f"{which} layers, {tokens} tokens in rows of {length}; largest: of a layer; {measured_at(results)}."
    head = ["mean error; half-lives:", *map(_lives_text, HALF_LIVES), "largest"]
    windows = markdown_table(["tokens of a window", "first tokens", "mean error", "largest"], of_windows, figures=True)
    return f"{markdown_table(head, lines, figures=True)}\n\n{windows}\n\n{note}"


def _lives_text(lives: list[int] | None) -> str:
    if lives is None:
        return "its own"
    low, high = lives
    return str(low) if low == high else f"{low} to {high}"


class Settings(Options):
    teacher: Annotated[Path, typer.Option(help="folder of the transformer")] = asset_path("tiny_teacher")
    text: Annotated[Path, typer.Option(help="text whose first tokens are read")] = asset_path("dev.txt")
    models: Models = tuple(name for name in STARTS if name != "window")
    length: Annotated[int, typer.Option(help="tokens of a row")] = 2048
    measured_tokens: Annotated[int, typer.Option(help="tokens in all")] = 2048
    every: Annotated[int, typer.Option(help="measure every so many layers")] = 1


def check(args) -> None:
    check_names("--models", args.models, STARTS)


def about(args) -> dict:
    """What was measured on what, without the places on this machine."""
    return {
        "model": model_record(args.teacher),
        "training_text": text_record(args.text),
    }


main = Experiment("long_starts", __file__, Settings, rows_to_run, check, about).command()

if __name__ == "__main__":
    typer.run(main)
