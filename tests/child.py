"""The environment of a script that a test runs in a new process."""

import os
from pathlib import Path

TESTS = Path(__file__).resolve().parent


def child_env(**variables: str) -> dict[str, str]:
    """The environment of this process, with one thread, in which the test modules and the checkout can be imported."""
    paths = [str(TESTS), str(TESTS.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"} | variables
