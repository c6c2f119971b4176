"""`memmix convert | align | distill | generate | report | eval ...`: the Python API from a shell.

Results go to stdout (with `--json` as one JSON object), progress and messages to stderr. A user's mistake is one line
and exit code 1, a wrong option is exit code 2. A command imports what it needs when it runs.
"""

import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated

import typer

from hf_memmix.commands import convert, doctor, generate, measure, plan, publish, run, sample, select, serve, train
from hf_memmix.commands.repeated import Command

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
COMMANDS = {
    "doctor": doctor.doctor,
    "plan": plan.plan,
    "convert": convert.convert,
    "import-hmf": convert.import_hmf,
    "import-gguf": convert.import_gguf,
    "align": train.align,
    "distill": train.distill,
    "merge": train.merge,
    "cache-teacher": train.cache_teacher,
    "sample-teacher": sample.sample_teacher,
    "generate": generate.generate,
    "report": measure.report,
    "eval": measure.evaluate,
    "select": select.select,
    "card": publish.card,
    "push": publish.push,
}
for _name, _command in COMMANDS.items():
    app.command(_name, cls=Command)(_command)
# options after the name of the program, also --help, are passed to the program
_PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}
app.command("run", cls=Command, context_settings=_PASS_ON)(run.run)
app.command("serve", cls=Command, context_settings=_PASS_ON)(serve.serve)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"memmix {_version('hf-memmix')}")
        typer.echo(", ".join(f"{name} {_version(name)}" for name in ("torch", "transformers")), nl=False)
        typer.echo(f", Python {platform.python_version()}")
        raise typer.Exit


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "not installed"


@app.callback()
def options(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print versions and exit.")
    ] = False,
) -> None:
    """Give a pretrained transformer a memory of fixed size."""


def main() -> None:
    """Run the command line; `memmix` (hf_memmix_cli.py) and `python -m hf_memmix_cli` call it."""
    app(prog_name="memmix")
