"""`memmix convert | align | distill | generate | report | eval ...`: the Python API from a shell.

Results go to stdout (with `--json` as one JSON object), progress and messages to stderr. A user's mistake is one line
and exit code 1, a wrong option is exit code 2. A command imports what it needs when it runs.
"""

import typer

from hf_memmix.commands import convert, generate, measure, publish, train

app = typer.Typer(
    help="Give a pretrained transformer a memory of fixed size.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
COMMANDS = {
    "convert": convert.convert,
    "import-hmf": convert.import_hmf,
    "align": train.align,
    "distill": train.distill,
    "merge": train.merge,
    "cache-teacher": train.cache_teacher,
    "generate": generate.generate,
    "report": measure.report,
    "eval": measure.evaluate,
    "select": measure.select,
    "card": publish.card,
    "push": publish.push,
}
for _name, _command in COMMANDS.items():
    app.command(_name)(_command)


def main() -> None:
    """Run the command line; the console script `memmix` and `python -m hf_memmix.cli` call it."""
    app()
