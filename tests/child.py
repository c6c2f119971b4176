"""The environment of a script that a test runs in a process of its own."""

import os
from pathlib import Path

TESTS = Path(__file__).resolve().parent


def child_env(**variables: str) -> dict[str, str]:
    """This process' environment, the modules of the tests and the checkout importable, one thread."""
    paths = [str(TESTS), str(TESTS.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"} | variables
