"""Chooses the implementation: Triton on an NVIDIA GPU, torch everywhere else.

`HF_MEMMIX_BACKEND=torch|triton` overrides the choice. On a CPU, Triton runs only with `TRITON_INTERPRET=1`, as in the
tests.
"""

import functools
import importlib.util
import os

import torch

BACKENDS = ("torch", "triton")


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def use_triton(x: torch.Tensor) -> bool:
    """Whether the op that got `x` should launch its Triton kernels.

    Raises:
        ValueError: `HF_MEMMIX_BACKEND` is neither "torch" nor "triton", or asks for Triton where it cannot run.
    """
    # a look-up that fails costs twice as much as this question, and every call of an op asks it
    if "HF_MEMMIX_BACKEND" not in os.environ:
        return x.is_cuda and x.dtype != torch.float64 and _has_triton()
    forced = os.environ["HF_MEMMIX_BACKEND"]
    if forced not in BACKENDS:
        raise ValueError(f"HF_MEMMIX_BACKEND={forced!r} is not one of {BACKENDS}; unset it to choose by device")
    if forced == "triton":
        if not _has_triton():
            raise ValueError("HF_MEMMIX_BACKEND=triton, but triton is not installed; unset it or `pip install triton`")
        if not x.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
            raise ValueError(
                f"HF_MEMMIX_BACKEND=triton needs a GPU, the input is on {x.device}; unset it, or set"
                " TRITON_INTERPRET=1 before the first import to run the kernels in Triton's interpreter"
            )
    return forced == "triton"
