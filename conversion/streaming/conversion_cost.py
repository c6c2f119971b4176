"""What a conversion by streaming will cost on this machine: peak memory, bytes and time.

Bytes are computed from shapes. Memory and time of the mixers are measured on one layer of each mixer with random
weights, the speed of the disk on a small file that is removed again. The teacher's weights need not be there.
"""

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from hf_memmix.conversion.families import attention_module
from hf_memmix.conversion.loading import check_finite_tensor
from hf_memmix.conversion.streaming.checkpoint import PIECE, Checkpoint
from hf_memmix.conversion.streaming.layer import build_mixer
from hf_memmix.conversion.streaming.matching import as_saved
from hf_memmix.conversion.streaming.shards import ShardWriter, header_of
from hf_memmix.mixers import ATTENTION
from hf_memmix.operating_system import forget_cached, peak_memory, release_memory, reset_peak

PROBE = 256 * 2**20  # bytes of the file with which the disk is measured


def streaming_cost(
    teacher: PreTrainedModel, student: PreTrainedModel, place: Path, planning: float = 0.0
) -> dict[str, int | float]:
    """The cost of converting `teacher` to `student`, both on "meta".

    Args:
        place: an existing folder on the disk that will hold the student.
        planning: seconds that the conversion needs before it reads the first weight.

    Returns:
        `peak_memory` of this process, `reads` and `writes` in bytes, and `seconds`. The teacher's files are assumed
        to be on the same disk, and not in the page cache.
    """
    reads, writes = as_saved(teacher), as_saved(student)
    cost = {name: _file_bytes(tensors) for name, tensors in (("reads", reads), ("writes", writes))}
    start = reset_peak()
    disk = _Disk.measured(place, min(PROBE, cost["writes"]))
    seconds = 0.0
    kinds = student.config.mixer_types
    for kind in {*kinds} - {ATTENTION}:
        seconds += kinds.count(kind) * _layer_seconds(teacher, student, kinds.index(kind))
    working = seconds + cost["reads"] * disk.read + cost["writes"] * (disk.check + disk.copy)
    busy = cost["reads"] * disk.read + cost["writes"] * disk.write  # of the disk, which flushes beside the work
    return {"peak_memory": max(peak_memory(), start), **cost, "seconds": planning + max(working, busy)}


@dataclass(frozen=True)
class _Disk:
    """Seconds per byte. `read`: from the disk; `check`: for NaN; `copy`: into the page cache; `write`: to the disk."""

    read: float
    check: float
    copy: float
    write: float

    @classmethod
    def measured(cls, place: Path, size: int) -> "_Disk":
        count = max(size // 2, 1)
        values = {"probe": torch.empty(count, dtype=torch.bfloat16, device="meta")}
        piece = torch.randn(min(count, PIECE // 2)).bfloat16()
        seconds = {}

        def pieces():
            for start in range(0, count, len(piece)):
                yield piece[: min(len(piece), count - start)]

        with tempfile.TemporaryDirectory(prefix=".memmix-probe-", dir=place) as name:
            folder, start = Path(name), time.perf_counter()
            with ShardWriter(folder, values, count) as writer:
                writer.write("probe", pieces())
                seconds["copy"] = time.perf_counter() - start
            seconds["write"] = time.perf_counter() - start
            file = next(folder.glob("*.safetensors"))
            forget_cached(file)
            start, seconds["check"] = time.perf_counter(), 0.0
            with Checkpoint(folder) as checkpoint:
                for read in checkpoint.pieces("probe"):
                    begin = time.perf_counter()
                    check_finite_tensor(read, "probe", "the probe")
                    seconds["check"] += time.perf_counter() - begin
            seconds["read"] = time.perf_counter() - start - seconds["check"]
        return cls(**{name: value / (2 * count) for name, value in seconds.items()})


def _layer_seconds(teacher: PreTrainedModel, student: PreTrainedModel, layer: int) -> float:
    """Time to convert one layer. The first of two runs also warms up the libraries."""
    module = attention_module(teacher, layer)
    for _ in range(2):
        generator = torch.Generator().manual_seed(0)
        values = {
            name: torch.randn(p.shape, generator=generator).mul_(0.02).to(p.dtype)
            for name, p in module.state_dict().items()
        }
        start = time.perf_counter()
        build_mixer(teacher, student, layer, 0, values)
        seconds = time.perf_counter() - start
        release_memory()
    return seconds


def _file_bytes(tensors: dict[str, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values()) + len(header_of(tensors, tensors))
