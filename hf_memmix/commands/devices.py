"""Chooses the device of a training command, and checks that all processes of a launch have a device."""

import os

from hf_memmix import launch
from hf_memmix.errors import UserError


def choose_device(device: str | None) -> None:
    """Make only one device visible to this process, because Trainer takes the first visible one.

    Args:
        device: "cpu", "cuda", "cuda:N" (the N-th of the visible GPUs), or None for Trainer's own choice.

    Raises:
        ValueError: `device` has another form, there is no such GPU, or a launcher has already assigned a device.
    """
    if device is None:
        return
    kind, _, number = device.partition(":")
    if not (kind == "cpu" and not number) and not (kind == "cuda" and (number.isdecimal() or device == "cuda")):
        raise UserError(f"--device is {device!r}; give cpu, cuda or, for the second GPU, cuda:1")
    if launch.processes() > 1:
        raise UserError(f"--device is {device!r}, but the launcher gives each process its device; leave it out")
    import torch

    from hf_memmix.visible_gpus import see_only, visible_gpus

    if kind == "cpu":
        see_only("")
        return
    count = torch.cuda.device_count()
    if int(number or 0) >= count:
        raise UserError(
            f"--device is {device!r}, but this machine shows {count} GPUs to PyTorch; give one of them, or cpu"
        )
    if number:
        visible = visible_gpus()
        see_only(visible[int(number)] if visible else number)


def check_processes() -> None:
    """Raise ValueError if several processes were launched for GPUs, and there is none."""
    processes = launch.processes()
    on_cpu = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes", "on")
    if processes < 2 or on_cpu:
        return
    import torch

    if not torch.cuda.is_available():
        raise UserError(
            f"the launcher started {processes} processes, one for each GPU, but PyTorch sees no GPU on this machine;"
            " use training/accelerate/cpu.yaml, or call memmix without a launcher"
        )
