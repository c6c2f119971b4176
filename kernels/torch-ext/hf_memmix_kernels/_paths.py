"""Which path each op takes on this machine, and why, without running one: for reports about an installation."""

from pathlib import Path

import torch

from . import _dispatch, _environment, _native

OPS = tuple(sorted(path.parent.name for path in Path(__file__).parent.glob("*/op.py")))


def path_of(op: str, gpu: int | None = None) -> tuple[str, str]:
    """The path of an op on a GPU, by its index, or on the CPU: "triton", "native" or "torch", and the reason.

    The reason is "" for the fastest path. On a GPU, a head size may still keep one call from Triton (`_device`).
    Native code is compiled if it is not in the cache yet.
    """
    if (forced := _environment.backend()) is not None:
        return forced, f"HF_MEMMIX_BACKEND={forced}"
    if gpu is not None:
        if not _dispatch._has_triton():
            return "torch", "triton is not installed"
        reason = _dispatch._obstacle(op, gpu)
        never = "" if torch.version.hip is None else "was never run on an AMD GPU"
        return ("triton", never) if reason is None else ("torch", reason)
    if not (Path(__file__).parent / op / "native.cpp").is_file():
        return "torch", "the op has no native code for a CPU"
    try:
        _native.library(op, needed=True)
    except _native.NativeError as error:
        return "torch", str(error)
    return "native", ""
