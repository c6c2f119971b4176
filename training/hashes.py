"""Hashes of weights and of files, sha256, the same on every machine."""

import hashlib
from pathlib import Path

import torch
from torch import nn


def file_hash(path: str | Path) -> str:
    """The hash of a file's content."""
    with Path(path).open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def teacher_hash(teacher: nn.Module | str | Path) -> str:
    """A hash of the files of a folder, or of the tensors of a model. The two hashes of one teacher differ."""
    digest = hashlib.sha256()
    if isinstance(teacher, nn.Module):
        for name, tensor in teacher.state_dict().items():
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
        return "tensors:" + digest.hexdigest()[:16]
    files = sorted(Path(teacher).glob("*.safetensors"))
    if not files:
        raise ValueError(f"{str(teacher)!r} has no *.safetensors files; give the folder of the teacher")
    for file in files:
        with file.open("rb") as content:
            digest.update(hashlib.file_digest(content, "sha256").digest())
    return "files:" + digest.hexdigest()[:16]
