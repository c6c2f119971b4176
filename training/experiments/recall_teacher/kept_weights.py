"""Rounds a teacher so that it fits into one small file, and makes its folder again from this file (unpack_teacher.py).

`teacher.py --keep teacher.bin` rounds every row of a matrix to multiples of an eighth of its root mean square. Such a
weight has about 5 bits of entropy: 23M weights take about 14 MB. The rounding comes before the teacher is measured, so
the file holds exactly the teacher of the results, and students can be trained in a second session.
"""

import json
import math
import zlib
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

STEPS = 8  # multiples per root mean square of a row
LARGEST = 127  # multiples, so that one byte holds a weight
WEIGHTS = "model.safetensors"


def rounded(weight: Tensor) -> tuple[Tensor, Tensor]:
    """The multiples [rows, columns] int8 and the steps [rows, 1] bf16 of a matrix [rows, columns]."""
    weight = weight.detach().float().cpu()
    steps = (weight.square().mean(1, keepdim=True).sqrt() / STEPS).clamp_min(1e-8).bfloat16()
    return (weight / steps.float()).round().clamp(-LARGEST, LARGEST).to(torch.int8), steps


def restored(multiples: Tensor, steps: Tensor) -> Tensor:
    """The matrix of `rounded`, in bf16."""
    return (multiples.float() * steps.float()).bfloat16()


@torch.no_grad()
def keep(model, folder: Path, file: Path) -> None:
    """Round a model in place and write it, with the JSON files of its folder, into `file`."""
    texts = {path.name: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.json"))}
    shapes, body = [], []
    for name, parameter in model.named_parameters():  # a tied matrix comes once
        if parameter.ndim == 2:
            parts = rounded(parameter)
            parameter.copy_(restored(*parts))
        else:
            parts = (parameter.detach().cpu().bfloat16(),)
            parameter.copy_(parts[0])
        shapes.append([name, list(parameter.shape)])
        body += [part.contiguous().view(torch.uint8).numpy().tobytes() for part in parts]
    packer = zlib.compressobj(strategy=zlib.Z_HUFFMAN_ONLY)  # weights do not repeat: searching would be in vain
    head = zlib.compress(json.dumps({"texts": texts, "shapes": shapes}).encode())
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(len(head).to_bytes(8, "little") + head + packer.compress(b"".join(body)) + packer.flush())


def unpack(file: Path, folder: Path) -> None:
    """Make the folder of the model that `keep` wrote."""
    data = file.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    head, body = json.loads(zlib.decompress(data[8:end])), zlib.decompress(data[end:])
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in head["texts"].items():
        (folder / name).write_text(text, encoding="utf-8")
    tensors, at = {}, 0

    def take(dtype: torch.dtype, shape: list[int]) -> Tensor:
        nonlocal at
        start, at = at, at + math.prod(shape) * dtype.itemsize
        return torch.frombuffer(bytearray(body[start:at]), dtype=dtype).view(shape)

    for name, shape in head["shapes"]:
        if len(shape) == 2:
            tensors[name] = restored(take(torch.int8, shape), take(torch.bfloat16, [shape[0], 1]))
        else:
            tensors[name] = take(torch.bfloat16, shape)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
