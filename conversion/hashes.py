"""Hashes of weights and of files, sha256, the same on every machine.

What an interrupted run leaves for its next start is sealed: the file holds a hash of its own content, so that a
changed bit is found when the file is read.
"""

import hashlib
import json
import os
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from hf_memmix.conversion.records import write_json
from hf_memmix.errors import UserError

SEAL = "sha256"  # the field of a JSON file, or of the metadata of a safetensors file, with the hash of its content


def file_hash(path: str | Path) -> str:
    """The hash of a file's content."""
    with Path(path).open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def teacher_hash(teacher: nn.Module | str | Path) -> str:
    """A hash of the files of a folder, or of the tensors of a model. The two hashes of one teacher differ."""
    digest = hashlib.sha256()
    if isinstance(teacher, nn.Module):
        for name, tensor in teacher.state_dict().items():
            _add_tensor(digest, name, tensor.detach().cpu().contiguous())
        return "tensors:" + digest.hexdigest()[:16]
    files = sorted(Path(teacher).glob("*.safetensors"))
    if not files:
        raise UserError(f"{str(teacher)!r} has no *.safetensors files; give the folder of the teacher")
    for file in files:
        with file.open("rb") as content:
            digest.update(hashlib.file_digest(content, "sha256").digest())
    return "files:" + digest.hexdigest()[:16]


def _add_tensor(digest, name: str, tensor: Tensor) -> None:
    digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
    digest.update(tensor.flatten().view(torch.uint8).numpy())


def hash_files(folder: str | Path, names: Collection[str] | None = None, without: Collection[str] = ()) -> dict:
    """The hash of every file in a folder, or of those with these names, by relative path."""
    if names is None:
        names = (path.relative_to(folder).as_posix() for path in Path(folder).rglob("*") if path.is_file())
    names = sorted(set(names) - set(without))
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return dict(zip(names, pool.map(lambda name: file_hash(Path(folder) / name), names), strict=True))


def check_files(folder: str | Path, hashes: dict[str, str], remedy: str) -> None:
    """Raise ValueError for the first file that is missing or differs from what was written."""
    for name in hashes:
        if not (Path(folder) / name).is_file():
            raise UserError(f"{name} is missing in {folder}; {remedy}")
    now = hash_files(folder, hashes)
    for name, value in hashes.items():
        if now[name] != value:
            raise UserError(f"{name} in {folder} is corrupt or truncated; {remedy}")


def write_sealed(path: str | Path, record: dict) -> None:
    """Write a JSON file with the hash of its content, atomically."""
    record = json.loads(json.dumps(record))  # the values that are read again: names of fields are strings there
    write_json(path, {**record, SEAL: _seal_of(record)})


def read_sealed(path: str | Path, remedy: str) -> dict:
    """The record of a file of `write_sealed`.

    Raises:
        ValueError: the file cannot be read, has no hash, or its content was changed.
    """
    try:
        record = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        record = None
    if not isinstance(record, dict):
        raise UserError(f"{str(path)!r} is not readable; {remedy}")
    _check_seal(path, record.pop(SEAL, None), _seal_of(record), remedy)
    return record


def _check_seal(path: str | Path, written: str | None, now: str, remedy: str) -> None:
    if written is None:
        raise UserError(f"{str(path)!r} has no hash of its content: an earlier version wrote it; {remedy}")
    if written != now:
        raise UserError(f"{str(path)!r} is corrupt: its content does not match its hash; {remedy}")


def _seal_of(record: dict) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def save_sealed(tensors: dict[str, Tensor], path: str | Path, record: dict) -> None:
    """Write a safetensors file with a record, as JSON values, and a hash of the record and of each tensor."""
    record = {**record, "tensors": {name: _hash_of(name, tensor) for name, tensor in tensors.items()}}
    metadata = {name: json.dumps(value) for name, value in record.items()}
    save_file(tensors, path, metadata={**metadata, SEAL: _seal_of(metadata)})


def _hash_of(name: str, tensor: Tensor) -> str:
    digest = hashlib.sha256()
    _add_tensor(digest, name, tensor)
    return digest.hexdigest()


class SealedTensors:
    """An open file of `save_sealed`. `record`: what was written with the tensors; `names`: of the tensors."""

    def __init__(self, path: str | Path, file, remedy: str):
        self._path, self._file, self._remedy = path, file, remedy
        metadata = dict(file.metadata() or {})
        _check_seal(path, metadata.pop(SEAL, None), _seal_of(metadata), remedy)
        self.record = {name: json.loads(value) for name, value in metadata.items()}
        self._hashes = self.record.pop("tensors")
        self.names = list(self._hashes)

    def read(self, name: str) -> Tensor:
        """A tensor. Raises ValueError if it is not as it was written."""
        try:
            tensor = self._file.get_tensor(name)
        except SafetensorError:  # it has another name
            tensor = None
        if tensor is None or _hash_of(name, tensor) != self._hashes[name]:
            raise UserError(f"{name} in {str(self._path)!r} is corrupt; {self._remedy}")
        return tensor


@contextmanager
def open_sealed(path: str | Path, remedy: str) -> Iterator[SealedTensors]:
    """A file of `save_sealed`, open for reading. A tensor is checked when it is read.

    Raises:
        ValueError: the file is missing, broken or has no hashes, or it was changed.
    """
    try:
        opened = safe_open(str(path), "pt")
    except (OSError, SafetensorError) as error:
        raise UserError(f"{str(path)!r} is missing or broken ({error}); {remedy}") from None
    with opened as file:
        yield SealedTensors(path, file, remedy)
