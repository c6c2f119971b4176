"""Files in the idx format, in which MNIST and Fashion-MNIST are published."""

import gzip
import math
from pathlib import Path

import torch
from torch import Tensor


def read_idx(path: Path) -> Tensor:
    """The bytes of an idx file: two zeros, the type 8 (unsigned bytes), the dimensions and their sizes.

    Raises:
        ValueError: another type, or not as many bytes as the header says.
    """
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    if len(data) < 4 or data[:3] != b"\0\0\x08":
        raise ValueError(f"{path} starts with {data[:4].hex()}: an idx file of unsigned bytes starts with 000008")
    rank = data[3]
    header = 4 + 4 * rank
    shape = [int.from_bytes(data[4 + 4 * i : 8 + 4 * i], "big") for i in range(rank)]
    if len(data) != header + math.prod(shape):
        raise ValueError(f"{path} has {len(data)} bytes, its header announces {header} + {math.prod(shape)}")
    return torch.frombuffer(bytearray(data[header:]), dtype=torch.uint8).view(shape)
