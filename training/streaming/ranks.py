"""The processes of one launch, which train different layers. They share the spool and a key-value store."""

import functools
import itertools
import json
import os
from collections.abc import Callable
from datetime import timedelta

import torch
from torch.distributed import PrefixStore

from hf_memmix.visible_gpus import see_only, visible_gpus

# a rank waits as long as others work. If one of them fails, the launcher ends all
PATIENCE = timedelta(days=30)
_runs = itertools.count()  # the same number in all processes, because they make the same runs


class Ranks:
    """This process and the number of processes of its launch.

    Args:
        rank, count: which of how many processes this is.
        store: their common store; None for one process.
    """

    def __init__(self, rank: int = 0, count: int = 1, store=None):
        self.rank, self.count, self._store = rank, count, store

    @classmethod
    def of_launch(cls) -> "Ranks":
        """The processes that `accelerate launch` or `torchrun` has started. Each one sees only its own GPU then."""
        if int(os.environ.get("WORLD_SIZE", "1")) < 2:
            return cls()
        _see_one_gpu(int(os.environ.get("LOCAL_RANK", "0")))
        store, rank, count = _rendezvous()
        return cls(rank, count, PrefixStore(f"memmix-{next(_runs)}", store))

    def share(self, name: str, make: Callable[[], dict]) -> dict:
        """The JSON value that rank 0 makes, in all processes."""
        if self._store is None:
            return make()
        if self.rank == 0:
            self._store.set(name, json.dumps(make()))
        return json.loads(self._store.get(name))


@functools.cache
def _rendezvous() -> tuple:
    store, rank, count = next(torch.distributed.rendezvous("env://"))
    store.set_timeout(PATIENCE)
    return store, rank, count


def _see_one_gpu(index: int) -> None:
    """Make only one of the visible GPUs visible, before CUDA starts."""
    visible = visible_gpus()
    count = len(visible) or torch.cuda.device_count()
    if not count:
        return
    if index >= count:
        raise ValueError(
            f"the launcher started more than {count} processes, but they see {count} GPUs; start {count} processes"
        )
    see_only(visible[index] if visible else str(index))
