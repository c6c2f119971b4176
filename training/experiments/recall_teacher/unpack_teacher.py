"""Makes the folder of the teacher of the results from one file, whose weights have about 5 bits each.

    git show 7cc42662:training/experiments/recall_teacher/results/teacher_kept.bin >teacher.bin
    python training/experiments/recall_teacher/unpack_teacher.py --file teacher.bin --out .scratch/teacher

Each row of a matrix was rounded to multiples of an eighth of its root mean square, before the teacher was measured.
"""

import json
import math
import zlib
from pathlib import Path
from typing import Annotated

import torch
import typer
from safetensors.torch import save_file


def unpack(file: Path, folder: Path) -> None:
    """Write the model's folder. The file holds zlib streams of a head (JSON) and of all tensors one after the other:
    a matrix as multiples [rows, columns] int8 and steps [rows, 1] bf16, other tensors in bf16.
    """
    data = file.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    head, body = json.loads(zlib.decompress(data[8:end])), zlib.decompress(data[end:])
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in head["texts"].items():
        (folder / name).write_text(text, encoding="utf-8")
    tensors, at = {}, 0

    def take(dtype: torch.dtype, shape: list[int]) -> torch.Tensor:
        nonlocal at
        start, at = at, at + math.prod(shape) * dtype.itemsize
        return torch.frombuffer(bytearray(body[start:at]), dtype=dtype).view(shape)

    for name, shape in head["shapes"]:
        if len(shape) == 2:
            multiples, steps = take(torch.int8, shape), take(torch.bfloat16, [shape[0], 1])
            tensors[name] = (multiples.float() * steps.float()).bfloat16()
        else:
            tensors[name] = take(torch.bfloat16, shape)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def main(
    file: Annotated[Path, typer.Option(help="file of the packed teacher")],
    out: Annotated[Path, typer.Option(help="folder for the teacher")],
) -> None:
    """Make the teacher's folder again."""
    unpack(file, out)
    print(f"teacher in {out}")


if __name__ == "__main__":
    typer.run(main)
