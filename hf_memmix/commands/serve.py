"""`memmix serve FOLDER ...`: check the installation and the model, say what a sequence costs, and start vLLM."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from hf_memmix.commands.checks import given_model, library
from hf_memmix.commands.common import err, out, print_json
from hf_memmix.commands.errors import one_line_errors

LENGTHS = (2048, 16384, 65536)
# the module behind the command `vllm`, which may be missing from PATH
VLLM = "vllm.entrypoints.cli.main"


def serve(
    context: typer.Context,
    model: Annotated[Path, typer.Argument(help="A converted model: a folder or a Hub id.")],
    check: Annotated[bool, typer.Option("--check", help="Check and print, and do not start the server.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="As --check, and print one JSON object to stdout.")] = False,
) -> None:
    """Serve a converted model with vLLM. Options of `vllm serve` follow the model: memmix serve DIR --port 8001.

    First it prints the memory that one sequence takes, and how many sequences fit into the memory.
    """
    prepare(model, context.args, show=not as_json, as_json=as_json)
    if not (check or as_json):
        os.execv(sys.executable, [sys.executable, "-m", VLLM, "serve", str(model), *context.args])


@one_line_errors
def prepare(model: Path, arguments: list[str], show: bool, as_json: bool) -> None:
    """Raise ValueError if vLLM cannot serve the model; print what it costs."""
    folder = given_model(model)
    with library():
        from hf_memmix.serving.capacity import capacity, check_installation, check_model

    check_installation()
    config = check_model(folder)
    record = capacity(folder, config, arguments, LENGTHS)
    if as_json:
        print_json(record)
    if show:
        _print(record)


def _print(record: dict) -> None:
    from hf_memmix.conversion.records import bytes_text

    layers = ", ".join(f"{row['layers']} x {row['mixer']} of {bytes_text(row['bytes'])}" for row in record["states"])
    err.print(f"states of one sequence, whatever its length: {layers}", markup=False, highlight=False)
    table = Table("tokens", "states", "keys and values", "in vLLM's blocks", "sequences that fit")
    for length, total in record["bytes"].items():
        state, known = record["state_bytes"], record["fit"] is not None
        taken, fit = (
            (bytes_text(record["blocks"][length]), f"{record['fit'][length]:,}") if known else ("unknown",) * 2
        )
        table.add_row(f"{length:,}", bytes_text(state), bytes_text(total - state), taken, fit)
    out.print(table)
    free = "unknown" if record["free"] is None else f"about {bytes_text(record['free'])}"
    err.print(f"memory for sequences: {free} ({record['memory']})", markup=False, highlight=False)
