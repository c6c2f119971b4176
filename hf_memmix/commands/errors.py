"""Errors that a user can cause are reported in one line; all others keep their traceback.

These are reported in one line:

- a UserError: it was written for the user;
- an OSError: files, the disk, the network, the Hub;
- a ValueError or RuntimeError of a library while it reads what the user has named (a model folder, a data set);
- a package that is not installed, unless it is our own, or a version of one that was not tested;
- too little memory.

If the reader of the output has ended, as `head` does, the command ends without a message.

A UserWarning is one line, too.

All other exceptions are defects of this project or of a library, and keep their traceback: another ValueError, such as
that of `int("x")` in our code, a TypeError, a KeyError, an AttributeError.
"""

import contextlib
import sys
import warnings
from collections.abc import Iterator
from functools import wraps
from pathlib import Path
from types import TracebackType

import typer

from hf_memmix.commands.common import err
from hf_memmix.errors import UserError, cut
from hf_memmix.versions import UntestedVersionError

OURS = ("hf_memmix", "hf_memmix_kernels", "hf_memmix_cli")
CHECKOUT = Path(__file__).parents[2]
# functions of libraries that read what a user names
READERS = {"from_pretrained", "load_dataset"}


def message_of(error: BaseException) -> str | None:
    """The message for an error that the user can correct; None for a defect, which keeps its traceback."""
    if isinstance(error, UntestedVersionError):
        return str(error)
    if isinstance(error, ImportError):
        name = error.name or ""
        # an ImportError without a name comes from a library that lacks one of its optional packages
        if _is_ours(name) or not (isinstance(error, ModuleNotFoundError) or not name):
            return None
        return f"{error}; {install_advice('train,eval')}"
    if isinstance(error, OSError):
        return str(error)
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        reason = (str(error).splitlines() or [""])[0]
        return f"there is not enough memory ({reason}); give a smaller batch or block size, or another device"
    if isinstance(error, UserError):
        return str(error)
    return cut(str(error)) if isinstance(error, (ValueError, RuntimeError)) and _read_by_a_library(error) else None


def install_advice(extras: str) -> str:
    """How to install the packages of these extras. hf_memmix is on no package index, so pip needs its checkout."""
    here = (CHECKOUT / "pyproject.toml").is_file()
    place = f"'{CHECKOUT}[{extras}]'" if here else f"'.[{extras}]' in a checkout of hf_memmix"
    return f"pip install {place} brings what training and measuring need"


def one_line_errors(command):
    """Report the mistakes of a user in one line on stderr, with exit code 1; an interrupt with exit code 130."""

    @wraps(command)
    def run(*args, **kwargs):
        try:
            with _short_warnings():
                result = command(*args, **kwargs)
            sys.stdout.flush()
            return result
        except KeyboardInterrupt:
            err.print("[yellow]interrupted[/]")
            raise typer.Exit(130) from None
        except Exception as error:
            if isinstance(error, BrokenPipeError) and _reader_has_ended():
                raise  # typer ends the program
            message = message_of(error)
            if message is None:
                raise
        err.print("error:", style="bold red", end=" ")
        # a name that is not UTF-8 is printed with escapes
        message = message.encode("utf-8", "backslashreplace").decode()
        err.print(message, markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(1)

    return run


@contextlib.contextmanager
def _short_warnings() -> Iterator[None]:
    """Print a UserWarning as its message alone; others, which are for programmers, keep their place in the code."""
    with warnings.catch_warnings():
        at_its_place = warnings.showwarning

        def show(message, category, *where, **more):
            if category is not UserWarning:
                return at_its_place(message, category, *where, **more)
            return err.print(f"warning: {message}", markup=False, highlight=False, soft_wrap=True)

        warnings.showwarning = show
        yield


def _reader_has_ended() -> bool:
    """Whether nobody reads the standard output any more. If somebody does, an empty line is written to it."""
    try:
        print(flush=True)  # only writing tells, because an output without a buffer has nothing left to flush
    except BrokenPipeError:
        return True
    return False


def _read_by_a_library(error: BaseException) -> bool:
    """Whether a library has raised the error while it read what the user named."""
    steps = list(_steps(error.__traceback__))
    readers = [i for i, step in enumerate(steps) if step.tb_frame.f_code.co_name in READERS]
    # from_pretrained also builds our own classes: an error in them is a defect
    return bool(readers) and not any(_is_ours(_module(step)) for step in steps[readers[-1] :])


def _steps(traceback: TracebackType | None) -> Iterator[TracebackType]:
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next


def _module(step: TracebackType) -> str:
    return step.tb_frame.f_globals.get("__name__") or ""


def _is_ours(module: str) -> bool:
    return module.split(".")[0] in OURS
