"""The spool: a folder with the hidden states of all training rows between two decoder layers of the teacher.

`layer-<i>.hidden` holds the inputs of layer i, one row [block_size, hidden size] after the other, without a header. It
is written under another name and renamed when it is complete. `layer-<i>.json`, written after that, holds dtype, size
and checksum. So a process that is killed leaves complete files or files that the next start removes.
"""

import mmap
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from hf_memmix.conversion.loading import read_json
from hf_memmix.conversion.records import bytes_text, write_json
from hf_memmix.conversion.saving import explain_write_errors

RECORD = "memmix_spool.json"  # names the run to which a spool belongs
_OWN_FILES = re.compile(r"layer-\d+\.(hidden|part|json)|\.layer-\d+\.json\.\d+\.part|" + re.escape(RECORD))
FORGET_AFTER = 2**28  # bytes that are read before the pages of a mapped file are given back
FULL = (
    "Trained layers and complete files of the spool are kept: make room, or give another --spool, and run the same"
    " command again"
)


class HiddenStates:
    """The inputs of one layer, mapped into memory. `rows[i]` is a view [block_size, hidden size], on the CPU."""

    def __init__(self, file: Path, dtype: torch.dtype, shape: tuple[int, int]):
        self._shape, self._dtype = shape, dtype
        with file.open("rb") as opened:
            self._map = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)  # torch warns about read-only memory
        self._values = torch.frombuffer(self._map, dtype=dtype).view(-1, *shape)
        self._read = 0

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, row: int) -> Tensor:
        values = self._values[row]
        self._read += values.nbytes
        if self._read > FORGET_AFTER and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)  # otherwise they count as memory of this process
            self._read = 0
        return values


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
            record = read_json(self._record(layer))
            dtype, size = getattr(torch, record["dtype"]), record["bytes"]
            if self.file(layer).stat().st_size != size or size != self.nbytes(dtype):
                return False
            hidden = HiddenStates(self.file(layer), dtype, self.shape)
            return _checksum(hidden[row] for row in range(self.rows)) == record["checksum"]
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return False

    def read(self, layer: int) -> HiddenStates:
        """The inputs of a layer."""
        return HiddenStates(self.file(layer), getattr(torch, read_json(self._record(layer))["dtype"]), self.shape)

    def write(self, layer: int, batches: Iterable[Tensor]) -> None:
        """Write the inputs of a layer, given as batches [B, block_size, hidden size] of rows in order.

        Raises:
            ValueError: the disk is full or cannot be written.
        """
        part = self.folder / f"layer-{layer}.part"
        total, size, dtype = 0, 0, None
        try:
            with explain_write_errors(self.file(layer), FULL), part.open("wb", buffering=0) as opened:
                for batch in batches:
                    values = batch.detach().cpu().contiguous()
                    dtype, total = values.dtype, total + _checksum([values])
                    view = memoryview(values.view(-1).view(torch.uint8).numpy())
                    while view:
                        count = opened.write(view)
                        view, size = view[count:], size + count
            if dtype is None or size != self.nbytes(dtype):
                raise RuntimeError(f"the inputs of layer {layer} have {size} bytes, not those of {self.rows} rows")
            os.replace(part, self.file(layer))
        finally:
            part.unlink(missing_ok=True)
        record = {"dtype": str(dtype).removeprefix("torch."), "bytes": size, "checksum": total % 2**64}
        with explain_write_errors(self._record(layer), FULL):
            write_json(self._record(layer), record)

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
        with explain_write_errors(self.folder, "Give another --spool"):
            self.folder.mkdir(parents=True, exist_ok=True)
        names = sorted(file.name for file in self.folder.iterdir())
        foreign = [name for name in names if not _OWN_FILES.fullmatch(name)]
        if foreign or (names and RECORD not in names):
            raise ValueError(
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
            raise ValueError(
                f"the disk of the spool {str(self.folder)!r} has {bytes_text(free)} free, and the hidden states need"
                f" {bytes_text(needed)} more; make room, give another disk with --spool, or fewer steps"
            )

    def _record(self, layer: int) -> Path:
        return self.folder / f"layer-{layer}.json"


def _checksum(parts: Iterable[Tensor]) -> int:
    """The sum of all 64-bit words, modulo 2^64; of all 16-bit words if a row is no multiple of 8 bytes."""
    total = 0
    for part in parts:
        # per row, because parts are batches when they are written and rows when they are read. int64 is the only
        # dtype whose sum is fast
        row = part.shape[-2] * part.shape[-1] * part.element_size()
        words = torch.int64 if row % 8 == 0 else torch.int16
        total += int(part.contiguous().view(-1).view(words).sum(dtype=torch.int64))
    return total % 2**64
