"""Processes that a test starts: a copy of its own process, or a new one."""

import multiprocessing
import os
import socket
import sys
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NamedTuple
from unittest import mock

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


# what a new process would import for seconds; a copy of one that has imported it, and computed nothing, starts at once
PRELOADED = ["torch.distributed", "hf_memmix.training.streaming", "hf_memmix.training.trainer", "tiny_teachers"]


class Ended(NamedTuple):
    """How a process has ended; `output`: what it has printed to stdout and stderr."""

    exitcode: int
    output: str

    @property
    def error(self) -> str:
        """The line of the exception that has ended it."""
        return next((line for line in reversed(self.output.splitlines()) if "Error: " in line), "")


def start_scripts(
    source: str, folder: Path, arguments=(), processes=1, launcher=True, **variables: str
) -> list[BaseProcess]:
    """Start Python code in processes that have computed nothing; several of them are the ranks of one launch.

    Args:
        source: the code, for which `sys.argv[1:]` are the arguments.
        folder: where the processes write what they print, `output-RANK`.
        launcher: this process holds the store of the ranks, as torchrun does; otherwise rank 0 does.
        variables: the environment, beside that of `child_env`.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with mock.patch.dict(os.environ, child_env(ACCELERATE_USE_CPU="1")):
        forkserver.ensure_running()
    store, started = None, []
    if processes > 1:
        store, port = _store_and_port(launcher)
        variables |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "WORLD_SIZE": str(processes)}
        variables |= {"TORCHELASTIC_USE_AGENT_STORE": str(launcher)}
    for rank in range(processes):
        own = variables | ({"RANK": str(rank), "LOCAL_RANK": str(rank)} if processes > 1 else {})
        given = (source, list(map(str, arguments)), str(folder / f"output-{rank}"), own)
        started.append(context.Process(target=_run_source, args=given, daemon=True))
        started[-1].start()
        started[-1].store = store  # lives as long as the process is known
    return started


def _store_and_port(launcher: bool):
    if launcher:
        from torch.distributed import TCPStore

        store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        return store, store.port
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return None, probe.getsockname()[1]


def ended(process: BaseProcess, folder: Path, rank: int = 0) -> Ended:
    """Wait for a process of `start_scripts`."""
    process.join(timeout=300)
    file = folder / f"output-{rank}"
    output = file.read_text()
    file.unlink()
    return Ended(process.exitcode, output)


def run_scripts(source: str, folder: Path, *arguments, **options) -> list[Ended]:
    """Run Python code as `start_scripts` does, and say how every process has ended."""
    started = start_scripts(source, folder, *arguments, **options)
    return [ended(process, folder, rank) for rank, process in enumerate(started)]


def _run_source(source: str, arguments: list[str], output: str, variables: dict[str, str]) -> None:
    import torch

    torch.set_num_threads(1)
    with open(output, "w") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
    os.environ |= variables
    sys.argv = ["script", *arguments]
    exec(compile(source, "script", "exec"), {"__name__": "__main__"})
