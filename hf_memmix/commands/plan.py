"""The command `memmix plan`: which stages of a conversion fit a GPU, and what they cost."""

import re
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from hf_memmix.command_options import command
from hf_memmix.commands.checks import check_stored_length, given_teacher, layers_of, library
from hf_memmix.commands.common import Json, out, print_json
from hf_memmix.commands.errors import one_line_errors
from hf_memmix.commands.layers import LayerChoices, LayerOptions
from hf_memmix.errors import UserError

LENGTH = 2048
FAR = 3  # times as many parameters as the model: the hours of such a measured run are too few for it
LONG = ("--length", "give a shorter one")
_COUNTS = {"": 1, "k": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


class Machine:
    """The teacher, and where it will be trained."""

    teacher: Annotated[Path, typer.Option(help="The transformer to convert: a folder or a Hub id.")]
    gpu_memory: Annotated[str, typer.Option("--gpu-memory", help='Memory of one GPU, e.g. "24GiB".')]
    tokens: Annotated[str, typer.Option(help='Tokens of each training stage, e.g. "50M".')] = "50M"
    gpus: Annotated[int, typer.Option(min=1, max=1024, help="Number of GPUs that may be used.")] = 1


class PlanOptions(LayerOptions, Machine):
    """The options of `memmix plan`."""

    length: Annotated[
        int | None,
        typer.Option(min=2, help="Number of tokens per sequence.", show_default="2048, or the teacher's limit"),
    ] = None
    as_json: Json = False


@one_line_errors
@command(PlanOptions)
def plan(args) -> None:
    """Say for each stage of a conversion whether it fits a GPU, with which settings, and how long it takes.

    Of the teacher only config.json is read. A temporary file of at most 256 MiB measures the disk. Memory is computed
    from shapes. Hours are estimated from measured training runs, of which the nearest in size counts, on the GPU that
    is named below them.
    """
    budget, count, length = _gpu_memory(args.gpu_memory), _tokens(args.tokens), args.length
    chosen = LayerChoices.of(args)
    folder = given_teacher(args.teacher)
    arguments, options, _ = chosen.arguments(layers_of(folder))
    if length is not None:
        check_stored_length(folder, "teacher", length, *LONG)
    with library():
        from hf_memmix.conversion import convert_model
        from hf_memmix.conversion.limits import check_length, limit_of
        from hf_memmix.conversion.loading import meta_teacher
        from hf_memmix.conversion.streaming.conversion_cost import streaming_cost
        from hf_memmix.training.planning.speed import measured
        from hf_memmix.training.planning.stage_settings import measured_beside, plan_stages

    start = time.perf_counter()
    original = meta_teacher(folder)
    length = min(LENGTH, limit_of(original)) if length is None else length
    check_length(original, "teacher", length, *LONG)
    student = convert_model(original.to("meta"), **arguments, mixers=options)
    planning = time.perf_counter() - start
    stages = plan_stages(original, student, budget, count, args.gpus, length)
    convert = streaming_cost(original, student, Path(tempfile.gettempdir()), planning)
    record = {
        "teacher": str(args.teacher),
        "parameters": original.num_parameters(),
        "mixer": arguments.get("mixer"),
        "layers": list(student.config.mixer_types),
        "options": {kind: own for kind, own in options.items() if own},
        "gpu_memory": budget,
        "tokens": count,
        "length": length,
        "convert": convert,
        "stages": [stage.record() for stage in stages],
        "measured": measured_beside(),
        "measured_on": measured()["gpu"],
    }
    print_json(record) if args.as_json else _print(record)


def _gpu_memory(text: str) -> int:
    """The bytes of a text such as "24GiB". Raises ValueError if no GPU computes anything with so few."""
    from hf_memmix.conversion.records import bytes_of, bytes_text
    from hf_memmix.training.planning import CONTEXT

    count = bytes_of(text, "--gpu-memory")
    if count <= CONTEXT:
        raise UserError(
            f"--gpu-memory is {text!r}, {bytes_text(count)}, but CUDA alone takes {bytes_text(CONTEXT)} of a GPU; give"
            " the memory of one GPU with its unit, e.g. 24GiB"
        )
    return count


def _tokens(text: str) -> int:
    """The number in a text such as "50M"."""
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,9})?)([kMBT]?)", text.strip())
    count = 0 if match is None else round(float(match[1]) * _COUNTS[match[2]])
    if count < 1:
        raise UserError(f'--tokens is {text!r}; give a number of at least 1, e.g. "50M"; units: k, M, B, T')
    return count


def _print(record: dict) -> None:
    from hf_memmix.conversion.records import bytes_text

    cost, budget = record["convert"], bytes_text(record["gpu_memory"])
    memory, took = bytes_text(cost["peak_memory"]), _duration(cost["seconds"])
    out.print(f"convert: no GPU, {memory} of memory, {took} on this machine", highlight=False)
    table = Table("stage", "fits", "GPUs", "memory", "hours")
    for row in record["stages"]:
        fits = "yes" if row["fits"] else f"no, at least {bytes_text(row['need'])}"
        hours = _hours(row["hours"]) if row["fits"] else ""
        table.add_row(row["stage"], fits, str(row["gpus"]), bytes_text(row["peak"]), hours)
    out.print(table)
    out.print(
        f"memory: peak of PyTorch's allocator on each GPU of {budget}; CUDA and fragmentation come on top\nhours:"
        f" {record['tokens']:,} tokens per stage, from runs on an {record['measured_on']}",
        highlight=False,
    )
    if compiled := [row for row in record["stages"] if row["compiled_hours"] is not None]:
        hours = "; ".join(f"{row['stage']} {_hours(row['compiled_hours'])}" for row in compiled)
        others = {*record["layers"]} - {"attention", "gka"}
        guess = " (with gka; other mixers by their steps without it)" if others else ""
        out.print(
            f"hours with compile: true in the recipe, compiling included, where it was measured{guess}: {hours}",
            highlight=False,
        )
    if far := [row["stage"] for row in record["stages"] if (row["larger"] or 0) > FAR]:
        out.print(
            f"{'; '.join(far) if len(far) < len(record['stages']) else 'every stage'}: more hours than that, because"
            f" only models of more than {FAR} times the size were measured, and a small one leaves a GPU partly idle",
            highlight=False,
        )
    if fitting := [row for row in record["stages"] if row["fits"]]:
        out.print("\nfields of the recipe:", highlight=False)
        for row in fitting:
            out.print(f"  {row['stage']}: {_yaml(row['recipe'])}", highlight=False)
    else:
        least = min(record["stages"], key=lambda row: row["need"])
        out.print(
            f"\nno stage fits into {budget}; {least['stage']} needs least, {bytes_text(least['need'])}: take a larger"
            " GPU, or give a shorter --length",
            highlight=False,
        )
    if record["measured"]:
        out.print("\nthe same arithmetic beside measured runs:", highlight=False)
        beside = Table("measured run", "measured", "computed", "ratio")
        for row in record["measured"]:
            beside.add_row(row["run"], bytes_text(row["measured"]), bytes_text(row["computed"]), f"{row['ratio']:.2f}")
        out.print(beside)


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 60 else f"{seconds / 60:.1f} min"


def _hours(hours: float | None) -> str:
    if hours is None:
        return "not measured"
    return f"{hours:,.0f}" if hours >= 10 else f"{hours:.2g}" if hours >= 0.01 else "below 0.01"


def _yaml(recipe: dict) -> str:
    parts = []
    for name, value in recipe.items():
        value = {True: "true", False: "false"}.get(value, value) if isinstance(value, bool) else value
        parts.append(f"{name}: {{optim: {value['optim']}}}" if isinstance(value, dict) else f"{name}: {value}")
    return ", ".join(parts)
