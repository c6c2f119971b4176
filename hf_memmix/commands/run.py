"""`memmix run PROGRAM ...`: start another program with the converted models registered.

`lm_eval` and `trl` load a model by the Auto classes of transformers, and have no option that imports a package first.
This command imports hf_memmix and then runs the program in the same process, as `accelerate launch` runs a script.
"""

import importlib.util
import runpy
import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Annotated

import typer

from hf_memmix.commands.checks import start_library
from hf_memmix.commands.errors import one_line_errors
from hf_memmix.errors import UserError

# the console scripts of these programs start new processes, in which hf_memmix is not imported; the value is the
# package of the scripts that such a process runs
SCRIPTS = {"trl": "trl.scripts"}


def run(
    context: typer.Context,
    program: Annotated[str, typer.Argument(help="Name of the program, such as lm_eval or trl.")],
) -> None:
    """Run another Python program, such as lm_eval or trl, with the converted models registered.

    The program receives every argument after its name: `memmix run trl sft --model_name_or_path DIR`. Start several
    processes with `accelerate launch -m hf_memmix_cli run trl sft ...`.
    """
    start = prepare(program, context.args)
    # from here on, errors and exit code are those of the program
    raise SystemExit(start())


@one_line_errors
def prepare(program: str, arguments: list[str]) -> Callable:
    """A function that runs the program; `sys.argv` is the program's from now on.

    Raises:
        ValueError: no installed distribution has a console script of this name.
    """
    found = tuple(entry_points(group="console_scripts", name=program))
    if not found:
        raise UserError(
            f"there is no program {program!r} in this Python environment; install it (pip install {program}), or give"
            " the name of a console script that a Python package has installed"
        )
    start_library()
    script = f"{SCRIPTS[program]}.{arguments[0]}" if program in SCRIPTS and arguments else None
    if script is not None and arguments[0].isidentifier() and _has_main(script):
        sys.argv = [f"{program} {arguments[0]}", *arguments[1:]]
        return lambda: runpy.run_module(script, run_name="__main__", alter_sys=True) and None
    sys.argv = [program, *arguments]
    return found[0].load()


def _has_main(module: str) -> bool:
    """Whether a module is there and can be run as a script."""
    spec = importlib.util.find_spec(module)
    return spec is not None and spec.loader is not None and "__main__" in (spec.loader.get_source(module) or "")
