"""Chooses the implementation: Triton on a GPU that an op's kernels run on, native code on a CPU with a compiler, torch
everywhere else.

`HF_MEMMIX_BACKEND=torch|triton|native` overrides the choice. On a CPU, Triton runs only with `TRITON_INTERPRET=1`, as
in the tests. Native code exists for a part of the functions, in float32 and bfloat16; the torch path runs the others.
What keeps the kernels from a GPU is in `_device.obstacle`; a warning says it once per op and GPU.
"""

import ctypes
import functools
import importlib.util
import warnings

import torch
from torch.autograd import forward_ad

from . import _device, _environment, _native

BACKENDS = ("torch", "triton", "native")
NATIVE_DTYPES = (torch.float32, torch.bfloat16)


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@functools.cache
def _obstacle(op: str, index: int, size: int = 0) -> str | None:
    """Why the kernels of `op` do not run on the GPU with this index; None if they do."""
    if not torch.cuda.is_available():
        return None  # a fake tensor on a machine without a GPU: nothing will run
    import triton

    version = tuple(map(int, triton.__version__.split(".")[:2]))
    return _device.obstacle(op, _device.of_index(index), version, size)


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(f"hf_memmix_kernels: {message}", stacklevel=4)


@functools.cache
def _runs(op: str, index: int, size: int) -> bool:
    """Whether Triton is installed and the kernels of `op` run on the GPU with this index; it warns if they do not."""
    if not _has_triton():
        return False
    if reason := _obstacle(op, index, size):
        _warn_once(f"{op} runs its torch path, which is slower: {reason}")
        return False
    if torch.version.hip is not None:
        _warn_once(
            "the Triton kernels compile for AMD GPUs, but were never run on one; HF_MEMMIX_BACKEND=torch chooses the"
            " torch path"
        )
    return True


def use_triton(x: torch.Tensor, op: str, size: int = 0) -> bool:
    """Whether `op`, the name of the op's folder, should launch its Triton kernels for `x`.

    `size` is the largest head size or the rank, for ops that run up to a size on some GPUs (`_device.obstacle`).

    Raises:
        ValueError: `HF_MEMMIX_BACKEND` names no backend, or asks for Triton where it cannot run.
    """
    forced = _environment.backend()
    if forced is None:
        return x.is_cuda and x.dtype != torch.float64 and _runs(op, x.device.index, size)
    if forced not in BACKENDS:
        raise ValueError(f"HF_MEMMIX_BACKEND={forced!r} is not one of {BACKENDS}; unset it to choose by device")
    if forced == "triton":
        if not _has_triton():
            raise ValueError("HF_MEMMIX_BACKEND=triton, but triton is not installed; unset it or `pip install triton`")
        if not x.is_cuda and not _environment.interprets():
            raise ValueError(
                f"HF_MEMMIX_BACKEND=triton needs a GPU, the input is on {x.device}; unset it, or set"
                " TRITON_INTERPRET=1 before the first import to run the kernels in Triton's interpreter"
            )
        if x.is_cuda and (reason := _obstacle(op, x.device.index, size)):
            raise ValueError(f"HF_MEMMIX_BACKEND=triton, but {op} has only its torch path here: {reason}; unset it")
    return forced == "triton"


def native_library(op: str, x: torch.Tensor, *others: torch.Tensor | None) -> ctypes.CDLL | None:
    """The native code of the op that got `x` and other tensors, if it should run: all are on a CPU, and there is a
    compiler.

    Ask this before `use_triton`, which refuses unknown backends.

    Raises:
        ValueError: `HF_MEMMIX_BACKEND` is "native", and the code cannot be compiled.
    """
    if not x.is_cpu or x.dtype not in NATIVE_DTYPES:
        return None
    forced = _environment.backend()
    # first what takes less time: without a compiler, every call asks in vain
    if forced != "native" and (forced is not None or _native.library(op) is None):
        return None
    for t in others:  # the torch path has a message for tensors of several devices, native code would crash
        if t is not None and not t.is_cpu:
            return None
    # torch.func wraps tensors, and a wrapper has no memory of its own; native code has no forward-mode derivative,
    # and torch.jit.trace does not see it
    if (
        torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or torch._C._get_tracing_state() is not None
    ):
        return None
    if forced is None:
        return _native.library(op)
    try:
        return _native.library(op, needed=True)
    except _native.NativeError as error:
        raise ValueError(f"HF_MEMMIX_BACKEND=native: {error}; unset it to run the torch path") from error
