"""`memmix serve FOLDER ...`: check the installation and the model, say what a sequence costs, and start vLLM."""

import os
import re
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from hf_memmix.commands.checks import given_model, library
from hf_memmix.commands.common import err, out, print_json
from hf_memmix.commands.errors import one_line_errors
from hf_memmix.errors import UserError

LENGTHS = (2048, 16384, 65536)
COMPILES = (
    "the first start on a CPU compiles the model, which takes minutes; vLLM keeps the result in ~/.cache/vllm."
    " With --enforce-eager it does not compile"
)
OWN = ("--check", "--json", "--states", "--states-space")  # options after the model are those of vLLM
SET_BY_STATES = ("--no-enable-prefix-caching", "--kv-transfer-config")
SERVED_NAME = "--served-model-name"
# the module behind the command `vllm`, which may be missing from PATH
VLLM = "vllm.entrypoints.cli.main"


def serve(
    context: typer.Context,
    model: Annotated[Path, typer.Argument(help="A converted model: a folder or a Hub id.")],
    check: Annotated[bool, typer.Option("--check", help="Check and print, and do not start the server.")] = False,
    states: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Keep the states of prompts here, for later starts and other servers."),
    ] = None,
    states_space: Annotated[
        float | None,
        typer.Option(
            metavar="GIB", min=0.001, help="The most that --states takes, for all models.", show_default="16"
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="As --check, and print one JSON object to stdout.")] = False,
) -> None:
    """Serve a converted model with vLLM. Options of `vllm serve` follow the model: memmix serve DIR --port 8001.

    First it prints the memory that one sequence takes, and how many sequences fit into the memory. A model with a chat
    template chats at /v1/chat/completions.
    """
    keep = kept_states(states, states_space)
    served, added = prepare(model, context.args, keep, show=not as_json, as_json=as_json)
    if not (check or as_json):
        os.execv(sys.executable, [sys.executable, "-m", VLLM, "serve", str(served), *context.args, *added])


@one_line_errors
def kept_states(states: Path | None, space: float | None) -> tuple[Path, int] | None:
    """The folder of states and the bytes that they may take there, or None."""
    if states is None and space is not None:
        raise UserError("--states-space belongs to --states; give --states too, or leave it out")
    return states and (states, int((space or 16) * 2**30))


@one_line_errors
def prepare(
    model: Path, arguments: list[str], keep: tuple[Path, int] | None, show: bool, as_json: bool
) -> tuple[Path, list[str]]:
    """Print what a model costs; returns the model for vLLM, and the options that give it its chat template and the
    folder of states.

    keep: the folder, and the bytes that states may take there. vLLM then gets a folder in the place of a Hub id:
    states belong to the weights in it, and the Hub may have other ones a moment later.

    Raises ValueError if vLLM cannot serve the model.
    """
    from hf_memmix.conversion.model_files import chat_template_of

    names = {re.split("[=.]", argument)[0].replace("_", "-") for argument in arguments}
    if not names.isdisjoint(OWN):
        raise UserError(f"{', '.join(OWN)} stand before the model: memmix serve --check {model} ...")
    if keep and (clash := names.intersection(SET_BY_STATES)):
        raise UserError(f"--states needs prefix caching and a connector of its own; leave {', '.join(clash)} out")
    if keep and "--revision" in names:
        raise UserError(
            f"--states belong to the files of one folder, and --revision may be a branch that moves; download it (hf"
            f" download {model} --revision NAME) and serve the folder that this prints"
        )
    folder = given_model(model)
    with library():
        from hf_memmix.serving.capacity import capacity, check_installation, check_model
        from hf_memmix.serving.vllm.options import options_of_states

    check_installation()
    config = check_model(folder)
    template = chat_template_of(folder)
    states = options_of_states(folder, *keep) if keep else []
    record = capacity(folder, config, [*arguments, *states], LENGTHS) | {"chat_template": template and str(template)}
    if keep and (least := min(record["bytes"].values())) > keep[1]:
        text = f"--states-space {keep[1] / 2**30:.3g} holds no prompt: one takes {least / 2**30:.3g} GiB"
        err.print(f"warning: {text}; no states will be found again", markup=False, highlight=False, soft_wrap=True)
    if as_json:
        print_json(record)
    if show:
        _print(record)
        chats = f"with the template of {template}" if template else "no: the tokenizer has no chat template"
        err.print(f"chats at /v1/chat/completions: {chats}", markup=False, highlight=False, soft_wrap=True)
        if not (record["on_gpu"] or "--enforce-eager" in arguments):
            err.print(COMPILES, markup=False, highlight=False, soft_wrap=True)
    given = any(argument.startswith("--chat-template") for argument in arguments)
    # a template in tokenizer_config.json is read by vLLM with the tokenizer, as are several templates
    several = (folder / "additional_chat_templates").is_dir()
    whole_file = template is not None and template.suffix == ".jinja"
    added = states + (["--chat-template", str(template)] if whole_file and not (given or several) else [])
    if not keep or folder == model:
        return model, added
    return folder, added if SERVED_NAME in names else [SERVED_NAME, str(model), *added]


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
