"""Processes that a test starts: a copy of its own process, or a new one."""

import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

TESTS = Path(__file__).resolve().parent


def forked(function: Callable) -> BaseProcess:
    """A process that runs `function` in a copy of this one.

    It starts at once, because it imports nothing again. What the function changes in modules does not change this
    process. Code that must see the start of a process, or trains, needs a new process.
    """
    process = multiprocessing.get_context("fork").Process(target=function, daemon=True)
    process.start()
    return process


def child_env(**variables: str) -> dict[str, str]:
    """The environment of this process, with one thread, in which the test modules and the checkout can be imported."""
    paths = [str(TESTS), str(TESTS.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"} | variables
