"""Which of a machine's GPUs this process sees: environment variables that count until the first use of a GPU."""

import os

import torch


def _variables() -> tuple[str, ...]:
    """The variables, the one that goes before the others first: AMD's GPUs obey NVIDIA's variable, too."""
    nvidia = "CUDA_VISIBLE_DEVICES"
    return (nvidia,) if torch.version.hip is None else ("HIP_VISIBLE_DEVICES", nvidia)


def visible_gpus() -> list[str]:
    """The names of the GPUs that the variables allow; empty if they allow all."""
    given = next((os.environ[name] for name in _variables() if name in os.environ), "")
    return [name for name in given.split(",") if name.strip()]


def see_only(gpu: str):
    """Make one GPU, by its name in `visible_gpus` or its number on the machine, the only visible one; "" hides all."""
    for name in _variables():
        os.environ[name] = gpu
