"""A folder of the states of prefixes, shared by servers: what `memmix serve --states DIR` reads and writes.

A prefix is a number of whole blocks of tokens. Its name is a hash of all its tokens, so it needs no index. For each
prefix there is one file with the states after it, and for each of its blocks one with the keys and values of kept
attention layers, if there are any. Every rank of tensor parallelism has files of its own.

Files belong to a folder whose name is a hash of all that they depend on (`identity`): other weights, other options or
another version have other folders. Files are written as a whole or not at all.
"""

import hashlib
import json
import math
import os
import tempfile
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

STATES, KEYS = "states", "keys"
SUFFIX, PART = ".safetensors", ".part"
QUANTIZATION_FILE = "quantization_config_file"  # in --hf-overrides
MODEL = "[0-9a-f]" * 32  # the names of `identity`: other folders beside them belong to somebody else
LONGEST_WRITE = 3600  # seconds; an older part belongs to no server
READ_AGAIN = 60  # seconds: until then, what other servers write is not seen
SHARE = 64  # of the space, a server writes one part before it reads the folder again
_SAMPLE = 4096  # bytes: at the beginning, the middle and the end of each tensor of the weights


class Room(NamedTuple):
    """What a folder holds.

    Args:
        bytes, files, models: that are there, of all models.
        deleted: files that had to go.
        most_bytes: the limit.
    """

    bytes: int
    files: int
    models: int
    deleted: int
    most_bytes: int

    def __str__(self) -> str:
        gone = f", {self.deleted:,} files that were not used for longest are deleted" if self.deleted else ""
        used, most = self.bytes / 2**30, self.most_bytes / 2**30
        return f"{used:.2f} of {most:.2f} GiB in {self.files:,} files of {self.models:,} models{gone}"


class StateStore:
    """The files of one model, in a folder that other models share.

    Args:
        root: the folder; made if it is missing.
        model: the name of the model's folder in it, see `identity`.
        most_bytes: of the files of all models together; those that were not used for longest are deleted. So a model
            whose weights, options or versions have changed makes room for the others. Several servers that write at a
            time may exceed it by one part in 64 each.
    """

    def __init__(self, root: Path, model: str, most_bytes: int):
        self.root, self.folder, self.most_bytes = root, root / model, most_bytes
        self.folder.mkdir(parents=True, exist_ok=True)
        # what the folder held when it was read, and this server's files since then
        self._read_at, self._room, self._written = -math.inf, None, []

    def has(self, kind: str, name: str, ranks: int) -> bool:
        """Whether all ranks have written this file."""
        return all(self._path(kind, name, rank).exists() for rank in range(ranks))

    def read(self, kind: str, name: str, rank: int) -> dict[str, Tensor] | None:
        """The tensors of a file on the CPU; None if it is gone, or damaged: then it is deleted."""
        path = self._path(kind, name, rank)
        try:
            with safe_open(path, "pt") as file:
                tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118, it is no dictionary
                is_whole = (file.metadata() or {}).get("crc32") == _checksum(tensors)
        except SafetensorError:
            is_whole = False
        except OSError:
            return None
        if not is_whole:
            with suppress(OSError):
                path.unlink()
            return None
        self.touch(kind, name, rank)
        return tensors

    def touch(self, kind: str, name: str, rank: int):
        """Note that a file was used now, unless it belongs to another user, or another server has just deleted it."""
        with suppress(OSError):
            os.utime(self._path(kind, name, rank))

    def write(self, kind: str, name: str, rank: int, tensors: dict[str, Tensor]) -> int:
        """Write a file, and return its bytes; 0 if there is one already.

        Raises:
            OSError: it cannot be written, e.g. because the disk is full.
        """
        path = self._path(kind, name, rank)
        if path.exists():
            return 0
        self.folder.mkdir(parents=True, exist_ok=True)  # another server may have found it empty
        handle, part = tempfile.mkstemp(dir=self.folder, suffix=PART)
        os.close(handle)
        try:
            save_file(tensors, part, {"crc32": _checksum(tensors)})
            os.chmod(part, self.folder.stat().st_mode & 0o666)  # whoever may use the folder; mkstemp gives 0600
            size = os.stat(part).st_size
            os.replace(part, path)
        except SafetensorError as error:  # in place of an OSError
            raise OSError(str(error)) from error
        finally:
            Path(part).unlink(missing_ok=True)
        self._written.append(size)
        return size

    def keep_room(self) -> Room:
        """`make_room`, if a minute has passed since the last one or this server has written much.

        A folder may have millions of files, which cannot be looked at after every step.
        """
        written, known = sum(self._written), self._room
        if known is None or time.monotonic() > self._read_at + READ_AGAIN:
            return self.make_room()
        if written > min(self.most_bytes // SHARE, self.most_bytes - known.bytes):
            return self.make_room()
        return known._replace(bytes=known.bytes + written, files=known.files + len(self._written), deleted=0)

    def make_room(self) -> Room:
        """Read the whole folder. If its files do not fit, delete those that were not used for longest, until the rest
        fits and, where files are small, leaves one part in 64 free. Delete what killed servers left, and the folders
        of models that have no files. What is not named as a model's folder is left alone.
        """
        self._read_at, self._written = time.monotonic(), []
        for path in self.root.glob(f"{MODEL}/*{PART}"):
            with suppress(OSError):
                if path.stat().st_mtime < time.time() - LONGEST_WRITE:
                    path.unlink()
        found = []
        for path in self.root.glob(f"{MODEL}/*{SUFFIX}"):
            try:
                status = path.stat()
            except FileNotFoundError:  # another server has deleted it
                continue
            found.append((status.st_mtime, status.st_size, path))
        total, kept = sum(size for _, size, _ in found), []
        goes_on, least = total > self.most_bytes, self.most_bytes - self.most_bytes // SHARE
        for _, size, path in sorted(found):
            goes_on = goes_on and (total > self.most_bytes or total - size >= least)
            if goes_on:
                with suppress(OSError):  # the folder may belong to another user
                    path.unlink(missing_ok=True)
                    total -= size
                    continue
            kept.append(path.parent)
        for folder in self.root.glob(MODEL):
            if folder not in (*kept, self.folder):
                with suppress(OSError):  # there are other files in it
                    folder.rmdir()
        self._room = Room(total, len(kept), len(set(kept)), len(found) - len(kept), self.most_bytes)
        return self._room

    def _path(self, kind: str, name: str, rank: int) -> Path:
        return self.folder / f"{name}.{kind}.{rank}{SUFFIX}"


def _checksum(tensors: dict[str, Tensor]) -> str:
    """Of what tensors on the CPU hold. A file is not flushed, so it may have gaps after a loss of power."""
    found = 0
    for name in sorted(tensors):
        found = zlib.crc32(tensors[name].contiguous().flatten().view(torch.uint8).numpy(), found)
    return str(found)


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


def with_contents(overrides):
    """`--hf-overrides` for `identity`: of a quantization file, the content counts and not the place."""
    if not isinstance(overrides, dict) or QUANTIZATION_FILE not in overrides:
        return overrides
    content = Path(overrides[QUANTIZATION_FILE]).read_bytes()
    return overrides | {QUANTIZATION_FILE: hashlib.sha256(content).hexdigest()}


def identity(weights: Path, **what) -> str:
    """A name for the states of a model: it changes with the files in its folder `weights`, and with `what` is given.

    Of each tensor the name, the shape and some samples count: reading all of it would take a start's time, and samples
    of whole files would not see that a training has changed one small tensor.
    """
    found = hashlib.sha256(json.dumps(what, sort_keys=True, default=str).encode())
    config = weights / "config.json"
    found.update(config.read_bytes() if config.is_file() else b"")
    for path in sorted(weights.glob(f"*{SUFFIX}")):
        size = path.stat().st_size
        found.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            header = file.read(int.from_bytes(file.read(8), "little"))
            found.update(header)
            start = file.tell()
            for name, tensor in sorted(json.loads(header).items()):
                if name == "__metadata__":
                    continue
                first, end = tensor["data_offsets"]
                last = max(first, end - _SAMPLE)
                for place in sorted({first, (first + last) // 2, last}):
                    file.seek(start + place)
                    found.update(file.read(min(_SAMPLE, end - first)))
    return found.hexdigest()[:32]
