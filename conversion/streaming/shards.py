"""Writes the safetensors files of a model, tensor by tensor in any order.

The bytes are those of `save_pretrained`: the same shards, header and order of tensors. While tensors are written, a
second thread flushes them to disk, so that the kernel never collects gigabytes of unwritten pages.
"""

import json
import os
import shutil
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import torch
from huggingface_hub import split_torch_state_dict_into_shards

from hf_memmix.conversion.records import bytes_text
from hf_memmix.conversion.saving import SHARD_SIZE
from hf_memmix.conversion.streaming.checkpoint import DTYPES
from hf_memmix.errors import UserError
from hf_memmix.operating_system import flush_data, write_at

# the safetensors library writes the tensors of one file in this order of dtypes, and by name within a dtype
_ORDER = ("I64", "F64", "F32", "I32", "BF16", "F16", "I16", "I8", "U8", "BOOL")
_CODES = {dtype: code for code, dtype in DTYPES.items()}
_FLUSH_EVERY = 128 * 2**20  # bytes


class ShardWriter:
    """The weight files of one model in `folder`. A context manager; after a clean exit all bytes are on disk.

    Args:
        folder: an existing folder.
        tensors: shapes and dtypes of all tensors by name, in the order of `save_pretrained`, on "meta".
        parameters: number of parameters of the model, which the index names.

    Raises:
        ValueError: the disk does not have enough space.
    """

    def __init__(self, folder: Path, tensors: dict[str, torch.Tensor], parameters: int):
        self.folder, self._tensors = folder, tensors
        split = split_torch_state_dict_into_shards(
            tensors, filename_pattern="model{suffix}.safetensors", max_shard_size=SHARD_SIZE
        )
        headers = {file: header_of(names, tensors) for file, names in split.filename_to_tensors.items()}
        self.nbytes = sum(t.nbytes for t in tensors.values()) + sum(len(header) for header in headers.values())
        if (free := shutil.disk_usage(folder).free) < self.nbytes:
            raise UserError(
                f"the disk of {str(folder.parent)!r} has {bytes_text(free)} free, and the student needs"
                f" {bytes_text(self.nbytes)}; make room, or choose another folder"
            )
        self._places: dict[str, tuple[int, int]] = {}  # file descriptor and offset of each tensor
        self._files: list[BinaryIO] = []
        self._unflushed, self._flushes = 0, []
        self._flusher = ThreadPoolExecutor(1, thread_name_prefix="flush")
        for file, header in headers.items():
            self._files.append((folder / file).open("xb", buffering=0))
            handle = self._files[-1].fileno()
            write_at(handle, memoryview(header), 0)
            offset = len(header)
            for name in _file_order(split.filename_to_tensors[file], tensors):
                self._places[name] = (handle, offset)
                offset += tensors[name].nbytes
        if split.is_sharded:
            metadata = {"total_parameters": parameters, **split.metadata}
            index = {"metadata": metadata, "weight_map": split.tensor_to_filename}
            text = json.dumps(index, indent=2, sort_keys=True) + "\n"
            (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")

    def write(self, name: str, pieces: Iterable[torch.Tensor]) -> None:
        """Write a whole tensor, given as pieces in order, which have its dtype."""
        handle, offset = self._places.pop(name)
        end = offset + self._tensors[name].nbytes
        for piece in pieces:
            values = piece.detach().contiguous().view(-1)
            if values.numel():
                write_at(handle, memoryview(values.view(torch.uint8).numpy()).cast("B"), offset)
                offset, self._unflushed = offset + values.nbytes, self._unflushed + values.nbytes
            if self._unflushed >= _FLUSH_EVERY:
                self._flush(handle)
        if offset != end:
            raise RuntimeError(f"{name} got {offset} bytes up to here, not {end}")

    def _flush(self, handle: int) -> None:
        if self._flushes and not self._flushes[-1].done():
            return
        for flush in self._flushes:
            flush.result()
        self._flushes, self._unflushed = [self._flusher.submit(flush_data, handle)], 0

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(self, kind, error, trace) -> None:
        self._flusher.shutdown(wait=True)
        try:
            if error is None:
                if self._places:
                    raise RuntimeError(f"{len(self._places)} tensors were not written: {next(iter(self._places))} ...")
                for flush in self._flushes:
                    flush.result()
                for file in self._files:
                    os.fsync(file.fileno())
        finally:
            for file in self._files:
                file.close()


def _file_order(names: Iterable[str], tensors: dict[str, torch.Tensor]) -> list[str]:
    return sorted(names, key=lambda name: (_ORDER.index(_CODES[tensors[name].dtype]), name))


def header_of(names: Iterable[str], tensors: dict[str, torch.Tensor]) -> bytes:
    """The first bytes of a safetensors file: the length of the header, and the header, padded to 8 bytes."""
    entries, offset = {"__metadata__": {"format": "pt"}}, 0
    for name in _file_order(names, tensors):
        tensor = tensors[name]
        ends = [offset, offset + tensor.nbytes]
        entries[name] = {"dtype": _CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": ends}
        offset = ends[1]
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
