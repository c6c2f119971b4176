"""The processes of one launch, which train different layers. They share the spool and a key-value store."""

import functools
import itertools
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
from accelerate.utils import parse_flag_from_env
from torch.distributed import DistError, PrefixStore

from hf_memmix import launch
from hf_memmix.errors import UserError

PATIENCE = timedelta(days=30)  # of the store: a rank waits as long as others work
POLL = 0.2  # seconds between two looks at what another process does
TELL_AFTER = 60.0  # seconds of waiting after which a process says what it waits for, again and again
FAILED = "failed"  # the key of the store under which a process says why it ends
_runs = itertools.count()  # the same number in all processes, because they make the same runs
Say = Callable[[str], None]


class Ranks:
    """This process and the number of processes of its launch.

    Args:
        rank, count: which of how many processes this is.
        store: their common store; None for one process.
        say: gets a line of text if this process waits for long.
    """

    def __init__(self, rank: int = 0, count: int = 1, store=None, say: Say = lambda line: None):
        self.rank, self.count, self._store, self._say = rank, count, store, say

    @classmethod
    def of_launch(cls, say: Say = lambda line: None) -> "Ranks":
        """The processes that `accelerate launch` or `torchrun` has started. Each one takes its own GPU."""
        if launch.processes() < 2:
            return cls()
        _take_gpu(launch.local_rank())
        store, rank, count = _rendezvous()
        return cls(rank, count, PrefixStore(f"memmix-{next(_runs)}", store), say)

    def share(self, name: str, make: Callable[[], dict]) -> dict:
        """The JSON value that rank 0 makes, in all processes.

        Raises:
            ValueError: another process has failed.
        """
        if self._store is None:
            return make()
        if self.rank == 0:
            self._store.set(name, json.dumps(make()))
        else:
            self.wait(lambda: self._store.check([name]), f"the {name} of the run, which process 0 makes")
        return json.loads(self._store.get(name))

    def wait(self, ready: Callable[[], bool], what: str) -> None:
        """Wait until `ready()`. what: what is waited for, for the line after `TELL_AFTER` seconds.

        Raises:
            ValueError: another process has failed.
        """
        start = told = time.monotonic()
        with self._reached():
            while not ready():
                if self._store is not None and self._store.check([FAILED]):
                    raise UserError(self._store.get(FAILED).decode())
                now = time.monotonic()
                if now - told >= TELL_AFTER:
                    self._say(f"process {self.rank} has waited {now - start:.0f} s for {what}")
                    told = now
                time.sleep(POLL)

    @contextmanager
    def telling_failure(self) -> Iterator[None]:
        """If an exception is raised inside this context, the other processes of the launch raise ValueError."""
        try:
            yield
        except Exception as error:
            if self._store is not None and not self._has_failed():
                reason = str(error).strip().splitlines() or [type(error).__name__]
                self._store.set(FAILED, f"process {self.rank} of the launch has failed: {reason[0]}")
            raise

    def _has_failed(self) -> bool:
        try:
            return self._store.check([FAILED])
        except DistError:  # the store is gone, so nobody can be told
            return True

    @contextmanager
    def _reached(self) -> Iterator[None]:
        try:
            yield
        except DistError:
            raise UserError(
                "the launch has lost its process 0 or its launcher, which hold the common store; see their last lines"
                " and run the same command again: it goes on with the layers that are not trained yet"
            ) from None


@functools.cache
def _rendezvous() -> tuple:
    store, rank, count = next(torch.distributed.rendezvous("env://"))
    store.set_timeout(PATIENCE)
    return store, rank, count


def _take_gpu(index: int) -> None:
    """Make one of the visible GPUs the current one, on which this process computes.

    To show the process only this GPU is not possible any more: CUDA reads CUDA_VISIBLE_DEVICES when it is asked for
    the number of GPUs, which imports of libraries have done.
    """
    count = 0 if parse_flag_from_env("ACCELERATE_USE_CPU") else torch.cuda.device_count()
    if not count:
        return
    if index >= count:
        raise UserError(
            f"the launcher started more than {count} processes, but they see {count} GPUs; start {count} processes"
        )
    torch.cuda.set_device(index)
