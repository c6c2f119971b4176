"""The console script `memmix`. It stands beside the package so that `memmix --help` answers at once.

Python runs `hf_memmix/__init__.py` before any module of the package, and that file registers the models with
transformers, which imports torch and takes seconds. `main` therefore puts the package into `sys.modules` without
running it; `hf_memmix.commands.checks.library` runs it when a command has checked its arguments.
"""

import importlib.util
import sys


def main() -> None:
    """Run the command line without importing torch or transformers before a command starts."""
    if "hf_memmix" not in sys.modules:
        spec = importlib.util.find_spec("hf_memmix")
        sys.modules["hf_memmix"] = importlib.util.module_from_spec(spec)
    from hf_memmix.commands import main as run

    run()


if __name__ == "__main__":
    main()
