"""The console script `memmix`. It stands beside the package so that `memmix --help` answers at once.

Python runs `hf_memmix/__init__.py` before any module of the package, and that file registers the models with
transformers, which imports torch and takes seconds. `main` therefore puts the package into `sys.modules` without
running it; `hf_memmix.commands.checks.library` runs it when a command has checked its arguments.
"""

import atexit
import importlib.util
import os
import sys


def main() -> None:
    """Run the command line without importing torch or transformers before a command starts."""
    if "hf_memmix" not in sys.modules:
        spec = importlib.util.find_spec("hf_memmix")
        sys.modules["hf_memmix"] = importlib.util.module_from_spec(spec)
    from hf_memmix.commands import main as run

    atexit.register(_end_quietly)
    run()


def _end_quietly() -> None:
    """Triton 3.9 prints a page about objects that were not freed, below the last line of a command that loads vLLM."""
    if "triton._C.libtriton" in sys.modules:
        sys.stderr.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


if __name__ == "__main__":
    main()
