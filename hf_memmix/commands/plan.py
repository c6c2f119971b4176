"""The command `memmix plan`: which stages of a conversion fit a GPU, and what they cost."""

import re
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from hf_memmix.commands.common import Json, KeepCount, KeepLayers, choice_of_layers, out, print_json
from hf_memmix.commands.errors import one_line_errors
from hf_memmix.commands.hub import model_folder

_COUNTS = {"": 1, "k": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


@one_line_errors
def plan(
    teacher: Annotated[Path, typer.Option(help="The transformer to convert: a folder or a Hub id.")],
    gpu_memory: Annotated[str, typer.Option("--gpu-memory", help='Memory of one GPU, e.g. "24GiB".')],
    tokens: Annotated[str, typer.Option(help='Tokens of each training stage, e.g. "50M".')] = "50M",
    mixer: Annotated[str, typer.Option(help="Mixer that replaces the attention.")] = "gka",
    keep_layers: KeepLayers = None,
    keep_count: KeepCount = None,
    gpus: Annotated[int, typer.Option(min=1, max=1024, help="Number of GPUs that may be used.")] = 1,
    length: Annotated[int, typer.Option(min=2, help="Number of tokens per sequence.")] = 2048,
    as_json: Json = False,
) -> None:
    """Say for each stage of a conversion whether it fits a GPU, with which settings, and how long it takes.

    Only the teacher's config.json is read. Memory is computed from shapes. Hours are estimated from measured training
    runs of 1B and 8B models on the GPU that the last line names.
    """
    from hf_memmix.conversion import convert_model
    from hf_memmix.conversion.estimate import meta_teacher
    from hf_memmix.conversion.limits import check_length
    from hf_memmix.conversion.records import bytes_of
    from hf_memmix.conversion.streaming.cost import streaming_cost
    from hf_memmix.training.planning.plan import measured_beside, plan_stages
    from hf_memmix.training.planning.speed import measured

    budget, count = bytes_of(gpu_memory, "--gpu-memory"), _tokens(tokens)
    if not budget:
        raise ValueError("--gpu-memory is 0; give the memory of one GPU, e.g. 24GiB")
    start = time.perf_counter()
    original = meta_teacher(model_folder(teacher))
    check_length(original, "teacher", length, "--length", "give a shorter one")
    keep = choice_of_layers(keep_layers, keep_count, None, keep_counts=False)
    student = convert_model(original.to("meta"), mixer, "none" if keep is None else keep)
    planning = time.perf_counter() - start
    stages = plan_stages(original, student, budget, count, gpus, length)
    convert = streaming_cost(original, student, Path(tempfile.gettempdir()), planning)
    record = {
        "teacher": str(teacher),
        "parameters": original.num_parameters(),
        "mixer": mixer,
        "gpu_memory": budget,
        "tokens": count,
        "convert": convert,
        "stages": [stage.record() for stage in stages],
        "measured": measured_beside(),
        "measured_on": measured()["gpu"],
    }
    print_json(record) if as_json else _print(record)


def _tokens(text: str) -> int:
    """The number in a text such as "50M"."""
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,9})?)([kMBT]?)", text.strip())
    count = 0 if match is None else round(float(match[1]) * _COUNTS[match[2]])
    if count < 1:
        raise ValueError(f'--tokens is {text!r}; give a number of at least 1, e.g. "50M"; units: k, M, B, T')
    return count


def _print(record: dict) -> None:
    from hf_memmix.conversion.records import bytes_text

    cost, minutes = record["convert"], record["convert"]["seconds"] / 60
    memory = bytes_text(cost["peak_memory"])
    out.print(f"convert: no GPU, {memory} of memory, {minutes:.1f} min on this machine", highlight=False)
    table = Table("stage", "fits", "GPUs", "memory", "hours", "recipe")
    for row in record["stages"]:
        if not row["fits"]:
            least = f"no: needs {bytes_text(row['need'])} at least"
            table.add_row(row["stage"], least, str(row["gpus"]), bytes_text(row["peak"]), "", "")
            continue
        hours = "not measured" if row["hours"] is None else f"{row['hours']:.2g}"
        table.add_row(row["stage"], "yes", str(row["gpus"]), bytes_text(row["peak"]), hours, _yaml(row["recipe"]))
    out.print(table)
    out.print(
        f"memory: peak of PyTorch's allocator on each GPU of {bytes_text(record['gpu_memory'])}; hours:"
        f" {record['tokens']:,} tokens per stage, from runs on an {record['measured_on']}",
        highlight=False,
    )
    if record["measured"]:
        beside = Table("measured run", "measured", "computed", "ratio")
        for row in record["measured"]:
            beside.add_row(row["run"], bytes_text(row["measured"]), bytes_text(row["computed"]), f"{row['ratio']:.2f}")
        out.print(beside)


def _yaml(recipe: dict) -> str:
    parts = []
    for name, value in recipe.items():
        value = {True: "true", False: "false"}.get(value, value) if isinstance(value, bool) else value
        parts.append(f"{name}: {{optim: {value['optim']}}}" if isinstance(value, dict) else f"{name}: {value}")
    return ", ".join(parts)
