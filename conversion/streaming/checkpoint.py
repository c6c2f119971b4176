"""Reads the tensors of safetensors files one after the other, or in pieces.

The files are read into buffers of known size. Mapped files would count as memory of the process, up to the
size of a whole shard.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch

from hf_memmix.conversion.loading import weight_files
from hf_memmix.errors import UserError
from hf_memmix.operating_system import read_at

# names of dtypes in the header of a safetensors file
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
PIECE = 16 * 2**20  # bytes that are in memory at a time


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor stands: `nbytes` bytes from byte `start` of a file."""

    name: str
    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    nbytes: int


class Checkpoint:
    """The safetensors files of a model folder, whose headers `check_weight_files` has accepted.

    `tensors`: `StoredTensor` by name. A context manager, which closes the files.

    Raises:
        ValueError: two files hold the same tensor, or a tensor has a dtype that no model can use.
    """

    def __init__(self, folder: Path):
        self.folder, self.files = folder, weight_files(folder)
        self.tensors: dict[str, StoredTensor] = {}
        self._opened: dict[Path, BinaryIO] = {}
        for file in self.files:
            for tensor in _header(file):
                if tensor.name in self.tensors:
                    first = self.tensors[tensor.name].file.name
                    raise UserError(
                        f"{str(folder)!r} has the tensor {tensor.name} in {first} and again in {file.name}; copy the"
                        " folder again"
                    )
                self.tensors[tensor.name] = tensor

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, *error) -> None:
        for opened in self._opened.values():
            opened.close()
        self._opened.clear()

    def read(self, name: str) -> torch.Tensor:
        """A whole tensor, in its stored dtype."""
        tensor = self.tensors[name]
        values = torch.empty(tensor.shape, dtype=tensor.dtype)
        if tensor.nbytes:
            self._read_into(values.view(-1).view(torch.uint8).numpy(), tensor.file, tensor.start)
        return values

    def pieces(self, name: str) -> Iterator[torch.Tensor]:
        """The values of a tensor in order, flat, at most `PIECE` bytes at a time. Each piece replaces the last one."""
        tensor = self.tensors[name]
        buffer = torch.empty(min(PIECE, tensor.nbytes), dtype=torch.uint8)
        for start in range(0, tensor.nbytes, PIECE):
            piece = buffer[: min(PIECE, tensor.nbytes - start)]
            self._read_into(piece.numpy(), tensor.file, tensor.start + start)
            yield piece.view(tensor.dtype)

    def _read_into(self, buffer, file: Path, start: int) -> None:
        if file not in self._opened:
            self._opened[file] = file.open("rb", buffering=0)
        view = memoryview(buffer).cast("B")
        while view:
            count = read_at(self._opened[file].fileno(), view, start)
            if not count:
                raise UserError(f"{str(file)!r} became shorter while it was read; copy it again")
            view, start = view[count:], start + count


def _header(file: Path) -> Iterator[StoredTensor]:
    """The tensors of a file, by the order of their data."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(length))
    header.pop("__metadata__", None)
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        if entry["dtype"] not in DTYPES:
            raise UserError(
                f"{str(file)!r} holds {name} in the type {entry['dtype']}; give the original weights in bf16, fp16 or"
                " fp32"
            )
        start, end = entry["data_offsets"]
        yield StoredTensor(name, file, DTYPES[entry["dtype"]], tuple(entry["shape"]), 8 + length + start, end - start)
