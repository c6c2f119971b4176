"""A folder of the states of prefixes, shared by servers: what `memmix serve --states DIR` reads and writes.

A prefix is a number of whole blocks of tokens. Its name is a hash of all its tokens, so it needs no index. For each
prefix there is one file with the states after it, and for each of its blocks one with the keys and values of kept
attention layers, if there are any. Every rank of tensor parallelism has files of its own.

Files belong to a folder whose name is a hash of all that they depend on (`identity`): other weights, other options or
another version have other folders. Files are written as a whole or not at all.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

STATES, KEYS = "states", "keys"
SUFFIX = ".safetensors"
_SAMPLES, _SAMPLE = 64, 4096  # of each file of weights


class StateStore:
    """The files of one model in a folder.

    Args:
        folder: made if it is missing.
        most_bytes: of all files together; those that were not read for longest are deleted.
    """

    def __init__(self, folder: Path, most_bytes: int):
        self.folder, self.most_bytes = folder, most_bytes
        folder.mkdir(parents=True, exist_ok=True)

    def has(self, kind: str, name: str, ranks: int) -> bool:
        """Whether all ranks have written this file."""
        return all(self._path(kind, name, rank).exists() for rank in range(ranks))

    def read(self, kind: str, name: str, rank: int) -> dict[str, Tensor] | None:
        """The tensors of a file on the CPU; None if it is gone, or damaged: then it is deleted."""
        path = self._path(kind, name, rank)
        try:
            tensors = load_file(path)
            os.utime(path)  # it was used now
        except SafetensorError:
            path.unlink(missing_ok=True)
            return None
        except OSError:
            return None
        return tensors

    def write(self, kind: str, name: str, rank: int, tensors: dict[str, Tensor]) -> int:
        """Write a file, and return its bytes; 0 if there is one already."""
        path = self._path(kind, name, rank)
        if path.exists():
            return 0
        handle, part = tempfile.mkstemp(dir=self.folder, suffix=".part")
        os.close(handle)
        try:
            save_file(tensors, part)
            os.replace(part, path)
        finally:
            Path(part).unlink(missing_ok=True)
        return path.stat().st_size

    def make_room(self):
        """Delete the files that were not used for longest, until the others fit."""
        found = []
        for path in self.folder.glob(f"*{SUFFIX}"):
            try:
                status = path.stat()
            except FileNotFoundError:  # another server has deleted it
                continue
            found.append((status.st_mtime, status.st_size, path))
        total = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if total <= self.most_bytes:
                return
            path.unlink(missing_ok=True)
            total -= size

    def _path(self, kind: str, name: str, rank: int) -> Path:
        return self.folder / f"{name}.{kind}.{rank}{SUFFIX}"


def prefix_names(tokens: Sequence[int], block: int, salt: str = "") -> Iterator[str]:
    """The names of the prefixes of 1, 2, ... whole blocks of these tokens.

    Args:
        tokens: of a prompt.
        block: tokens of a block.
        salt: prefixes of another salt have other names.
    """
    found = hashlib.sha256(salt.encode())
    rest = iter(tokens)
    for _ in range(len(tokens) // block):
        found.update(torch.tensor(list(islice(rest, block))).numpy().tobytes())
        yield found.hexdigest()[:32]


def identity(weights: Path, **what) -> str:
    """A name for the states of a model: it changes with the files in its folder `weights`, and with `what` is given.

    Of each file of weights the size, the header and some samples count: reading all of it would take a start's time.
    """
    found = hashlib.sha256(json.dumps(what, sort_keys=True, default=str).encode())
    config = weights / "config.json"
    found.update(config.read_bytes() if config.is_file() else b"")
    for path in sorted(weights.glob(f"*{SUFFIX}")):
        size = path.stat().st_size
        found.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            header = int.from_bytes(file.read(8), "little")
            found.update(file.read(header))
            for i in range(_SAMPLES):
                file.seek(i * max(size - _SAMPLE, 0) // (_SAMPLES - 1))
                found.update(file.read(_SAMPLE))
    return found.hexdigest()[:32]
