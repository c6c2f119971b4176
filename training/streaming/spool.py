"""The spool: a folder with the hidden states of all training rows between two decoder layers of the teacher.

`layer-<i>.hidden` holds the inputs of layer i, one row [block_size, hidden size] after the other, without a header. It
is written under another name and renamed when it is complete. `layer-<i>.json`, written after that, holds dtype, size
and checksum. So a process that is killed leaves complete files or files that the next start removes.

Several threads read and write, a row each, from and into buffers that are used again. The first access to a page of a
mapped file, or of new memory, costs more time than its bytes: 4 s against 0.5 s for each GiB.
"""

import os
import re
import shutil
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from hf_memmix.conversion.hashes import read_sealed, write_sealed
from hf_memmix.conversion.records import bytes_text
from hf_memmix.conversion.saving import explain_write_errors
from hf_memmix.errors import UserError
from hf_memmix.operating_system import read_at, write_at

RECORD = "memmix_spool.json"  # names the run to which a spool belongs
_OWN_FILES = re.compile(r"layer-\d+\.(hidden|part|json)|\.layer-\d+\.json\.\d+\.part|" + re.escape(RECORD))
THREADS = 8  # that read or write; most of them wait for the disk or copy memory
CHECKED_ROWS = 16  # rows that are read together for a checksum
FULL = (
    "Trained layers and complete files of the spool are kept: make room, or give another --spool, and run the same"
    " command again"
)


class HiddenStates:
    """The inputs of one layer in a file. It is a context that closes the file.

    Args:
        file: with rows [block size, hidden size].
        dtype: of its values.
        shape: block size and hidden size.
    """

    def __init__(self, file: Path, dtype: torch.dtype, shape: tuple[int, int]):
        self._dtype, self._shape = dtype, shape
        self._file = file.open("rb", buffering=0)
        self._row_bytes = shape[0] * shape[1] * dtype.itemsize
        self._buffer: Tensor | None = None

    def __enter__(self) -> "HiddenStates":
        return self

    def __exit__(self, *error) -> None:
        self._file.close()

    def read(self, rows: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
        """The rows with these numbers as a batch [B, block_size, hidden size] on a device."""
        device = torch.device(device)
        batch = self._host_batch(len(rows), device)
        deque(_pool().map(self._read_row, rows, batch), maxlen=0)  # raises the error of a row
        return batch.to(device)

    def _host_batch(self, count: int, device: torch.device) -> Tensor:
        if device.type != "cuda":  # the caller gets this memory itself
            return torch.empty(count, *self._shape, dtype=self._dtype)
        if self._buffer is None or len(self._buffer) < count:
            self._buffer = torch.empty(count, *self._shape, dtype=self._dtype, pin_memory=True)
        return self._buffer[:count]

    def _read_row(self, row: int, into: Tensor) -> None:
        view, place = _bytes(into), row * self._row_bytes
        while view:
            count = read_at(self._file.fileno(), view, place)
            if not count:
                raise UserError(f"{self._file.name!r} ends before row {row}; another process has changed it")
            view, place = view[count:], place + count


class _Writer:
    """Writes batches to a new file, while the next batch is computed. It is a context that closes the file."""

    def __init__(self, file: Path):
        self._file = file.open("wb", buffering=0)
        self._buffers: list[Tensor | None] = [None, None]  # one is written while the other one is filled
        self._pending: list[Future] = []
        self.size, self.checksum, self.dtype = 0, 0, None

    def __enter__(self) -> "_Writer":
        return self

    def __exit__(self, *error) -> None:
        try:
            self.finish()
        finally:
            self._file.close()

    def write(self, batch: Tensor) -> None:
        """Begin to write a batch [B, block_size, hidden size]."""
        values = self._on_host(batch.detach())
        self.finish()
        self.dtype = values.dtype
        for row in values:
            self._pending.append(_pool().submit(self._write_row, row, self.size))
            self.size += row.nbytes

    def finish(self) -> None:
        """Wait until everything has been written. Raises the OSError of a write that failed."""
        finished, self._pending = self._pending, []
        wait(finished)
        for row in finished:
            self.checksum = (self.checksum + row.result()) % 2**64

    def _on_host(self, batch: Tensor) -> Tensor:
        if batch.device.type != "cuda":
            return batch.cpu().contiguous()
        self._buffers.reverse()
        buffer = self._buffers[0]
        if buffer is None or buffer.dtype != batch.dtype or len(buffer) < len(batch):
            buffer = self._buffers[0] = torch.empty(batch.shape, dtype=batch.dtype, pin_memory=True)
        return buffer[: len(batch)].copy_(batch)

    def _write_row(self, row: Tensor, place: int) -> int:
        write_at(self._file.fileno(), _bytes(row), place)
        return _checksum(row[None], place // row.nbytes)


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(THREADS, thread_name_prefix="memmix-spool")


def _bytes(values: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    return memoryview(values.view(-1).view(torch.uint8).numpy())


class Spool:
    """The files of a spool.

    Args:
        folder: where they lie.
        rows: number of rows.
        shape: block size and hidden size.
    """

    def __init__(self, folder: Path, rows: int, shape: tuple[int, int]):
        self.folder, self.rows, self.shape = folder, rows, shape

    def file(self, layer: int) -> Path:
        """The file with the inputs of a layer."""
        return self.folder / f"layer-{layer}.hidden"

    def nbytes(self, dtype: torch.dtype) -> int:
        """Bytes of the inputs of one layer."""
        return self.rows * self.shape[0] * self.shape[1] * dtype.itemsize

    def is_ready(self, layer: int) -> bool:
        """Whether the inputs of a layer have been written completely."""
        return self._record(layer).is_file()

    def is_sound(self, layer: int) -> bool:
        """Whether the inputs of a layer are there with the values that were written. It reads the whole file."""
        if not self.is_ready(layer):
            return False
        try:
            record = self._read_record(layer)
            dtype, size = getattr(torch, record["dtype"]), record["bytes"]
            if self.file(layer).stat().st_size != size or size != self.nbytes(dtype):
                return False
            total = 0
            with HiddenStates(self.file(layer), dtype, self.shape) as hidden:
                for start in range(0, self.rows, CHECKED_ROWS):
                    total += _checksum(hidden.read(range(start, min(start + CHECKED_ROWS, self.rows))), start)
            return total % 2**64 == record["checksum"]
        except (OSError, ValueError):
            return False

    def read(self, layer: int) -> HiddenStates:
        """The inputs of a layer, as a context."""
        return HiddenStates(self.file(layer), getattr(torch, self._read_record(layer)["dtype"]), self.shape)

    def write(self, layer: int, batches: Iterable[Tensor]) -> None:
        """Write the inputs of a layer, given as batches [B, block_size, hidden size] of rows in order.

        Raises:
            ValueError: the disk is full or cannot be written.
        """
        part = self.folder / f"layer-{layer}.part"
        try:
            with explain_write_errors(self.file(layer), FULL), _Writer(part) as writer:
                for batch in batches:
                    writer.write(batch)
            dtype, size = writer.dtype, writer.size
            if dtype is None or size != self.nbytes(dtype):
                raise RuntimeError(f"the inputs of layer {layer} have {size} bytes, not those of {self.rows} rows")
            os.replace(part, self.file(layer))
        finally:
            part.unlink(missing_ok=True)
        record = {"dtype": str(dtype).removeprefix("torch."), "bytes": size, "checksum": writer.checksum}
        with explain_write_errors(self._record(layer), FULL):
            write_sealed(self._record(layer), record)

    def remove(self, layer: int) -> None:
        """Remove the inputs of a layer."""
        self._record(layer).unlink(missing_ok=True)
        self.file(layer).unlink(missing_ok=True)

    def layers(self) -> list[int]:
        """The layers whose inputs are there, complete or not."""
        names = (re.match(r"layer-(\d+)\.", file.name) for file in self.folder.iterdir())
        return sorted({int(match[1]) for match in names if match})

    def clear(self) -> None:
        """Remove all files of the spool, and the folder if it is empty then."""
        if not self.folder.is_dir():
            return
        for file in list(self.folder.iterdir()):
            if _OWN_FILES.fullmatch(file.name):
                file.unlink(missing_ok=True)
        if not any(self.folder.iterdir()):
            self.folder.rmdir()

    def check_folder(self) -> None:
        """Make the folder if it does not exist, and remove what a killed process has left.

        Raises:
            ValueError: the folder holds other files, or files of a spool without its record, or cannot be made.
        """
        with explain_write_errors(self.folder, otherwise="Give another --spool"):
            self.folder.mkdir(parents=True, exist_ok=True)
        names = sorted(file.name for file in self.folder.iterdir())
        foreign = [name for name in names if not _OWN_FILES.fullmatch(name)]
        if foreign or (names and RECORD not in names):
            raise UserError(
                f"the spool {str(self.folder)!r} is not empty and belongs to no run: it holds {(foreign or names)[0]};"
                " give a new or empty folder with --spool"
            )
        for name in names:
            if name.endswith(".part"):
                (self.folder / name).unlink(missing_ok=True)

    def check_space(self, buffers: int, dtype: torch.dtype) -> None:
        """Raise ValueError if the disk has no room for `buffers` files of the size of a layer's inputs."""
        have = sum(file.stat().st_size for file in self.folder.glob("layer-*.hidden"))
        needed, free = buffers * self.nbytes(dtype) - have, shutil.disk_usage(self.folder).free
        if needed > free:
            raise UserError(
                f"the disk of the spool {str(self.folder)!r} has {bytes_text(free)} free, and the hidden states need"
                f" {bytes_text(needed)} more; make room, give another disk with --spool, or fewer steps"
            )

    def _record(self, layer: int) -> Path:
        return self.folder / f"layer-{layer}.json"

    def _read_record(self, layer: int) -> dict:
        return read_sealed(self._record(layer), "run the same command again")


def _checksum(rows: Tensor, first: int) -> int:
    """A checksum of rows [B, block_size, hidden size] that are those from number `first` on, modulo 2^64.

    Each row has the sum of its 64-bit words, or of its 16-bit words if it is no multiple of 8 bytes. It is multiplied
    by an odd number that belongs to the row, so that exchanged rows are found.
    """
    # int64 is the only dtype whose sum is fast
    words = torch.int64 if rows[0].nbytes % 8 == 0 else torch.int16
    sums = rows.contiguous().view(len(rows), -1).view(words).sum(1, dtype=torch.int64).tolist()
    return sum((2 * row + 1) * value for row, value in enumerate(sums, first)) % 2**64
