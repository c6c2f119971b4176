"""Functions for measurements and reports: the machine of a measurement, JSON files, Markdown tables, byte sizes."""

import contextlib
import json
import os
import platform
import re
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:  # a command checks its arguments before it imports torch
    import torch

from hf_memmix.environment import known_commit
from hf_memmix.errors import UserError

CHECKOUT = Path(__file__).resolve().parents[1]


def hardware(device: "torch.device | str | None" = None) -> str:
    """The name of the GPU, or the name of the processor and its number of cores.

    device: the device of the measurement; default: the GPU if there is one.
    """
    import torch

    on_gpu = torch.cuda.is_available() if device is None else torch.device(device).type == "cuda"
    if on_gpu:
        return torch.cuda.get_device_name(device)
    return f"{processor()}, {os.cpu_count()} cores"


def processor() -> str:
    """The name of the processor."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines() if cpuinfo.exists() else []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def commit() -> str:
    """The short hash of the checkout's commit: `$HF_MEMMIX_COMMIT` if it is set; "unknown" outside a checkout."""
    known = known_commit()
    # an installed package has no .git; git would then find the repository of a folder above it
    if not known and (CHECKOUT / ".git").exists():
        command = ["git", "-C", str(CHECKOUT), "rev-parse", "--short", "HEAD"]
        known = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    return known or "unknown"


def environment(device: "torch.device | str | None" = None) -> dict[str, str]:
    """The record of a measurement's surroundings: `{"hardware", "torch", "transformers", "python", "commit"}`."""
    import torch
    import transformers

    return {
        "hardware": hardware(device),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "commit": commit(),
    }


@contextlib.contextmanager
def atomic_file(path: str | Path) -> Iterator[BinaryIO]:
    """A new file for bytes, which stands at `path`, flushed to disk, when the block ends without an error.

    Until then, and after an error, `path` is as before. Missing folders are made.
    """
    path = Path(path).absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def write_json(path: str | Path, content: object, indent: int | None = 1) -> None:
    """Write `content` as a JSON file, as `atomic_file` does."""
    with atomic_file(path) as file:
        file.write((json.dumps(content, indent=indent) + "\n").encode())


def markdown_table(head: Sequence, rows: Iterable[Sequence], figures: bool = False) -> str:
    """A Markdown table; cells are written with `str`. `figures`: align all columns except the first one right."""
    line = ["---"] + ["---:" if figures else "---"] * (len(head) - 1)
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in (head, line, *rows))


def bytes_text(count: float) -> str:
    """A number of bytes in the binary unit that keeps it short, e.g. "1.5 MiB"."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:,.1f} GiB"


_UNITS = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "kB": 10**3, "MB": 10**6, "GB": 10**9}


def bytes_of(text: str, name: str) -> int:
    """The number in a text such as "65536", "1.5 MiB" or "2GB". `name`: the option, for the error message.

    Raises:
        ValueError: the text has another form.
    """
    match = re.fullmatch(r"\s*(\d{1,15}(?:\.\d{1,9})?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2] not in _UNITS:
        units = ", ".join(unit for unit in _UNITS if unit)
        raise UserError(f'{name} is {text!r}; give a number of bytes, e.g. "65536" or "1.5MiB"; units: {units}')
    return int(float(match[1]) * _UNITS[match[2]])
