"""Launches of the two walks of "dec" in CUDA C++ (kernels/sequential/cuda/), in the place of Triton's kernels."""

import functools
import logging
from pathlib import Path

import torch
from torch import Tensor

from .._cuda import CudaKernel, has_nvrtc, load
from .._device import device_of, has_ptx

FOLDER = Path(__file__).parent / "kernels" / "sequential" / "cuda"
# number and size of the slots, and threads per program: two roles of 4 warps, as in common.cu
SIZE, THREADS = 64, 256
# bytes of `Shared` in walk.cu: q, k, v and gamma of 32 tokens, 12 vectors, and a tile with rows of 68
SHARED = 32 * (3 * SIZE * 2 + 4) + 12 * SIZE * 4 + SIZE * (SIZE + 4) * 4
# bytes of `Shared` in walk_back.cu: twice the inputs of 32 tokens, 8 tiles, and two sums over 4 warps
SHARED_BACK = 2 * 32 * (4 * SIZE * 4 + 3 * SIZE * 2 + 2 * 4) + 8 * SIZE * SIZE * 4 + 2 * 4 * SIZE * 4
logger = logging.getLogger(__name__)


def can_walk(q: Tensor, k: Tensor, v: Tensor, state: Tensor, shared: int = SHARED) -> bool:
    """Whether a walk that needs so many bytes of shared memory exists for such inputs: 64 slots of size 64, all
    inputs in the same 16 bits.
    """
    return (
        has_ptx(v)
        and v.dtype in (torch.bfloat16, torch.float16)
        and q.dtype == k.dtype == v.dtype
        and tuple(state.shape[2:]) == (SIZE, SIZE)
        and device_of(v).shared >= shared
        and has_nvrtc()
        and _kernels(v.device.index, v.dtype) is not None
    )


def can_walk_back(q: Tensor, k: Tensor, do: Tensor, state: Tensor) -> bool:
    """As `can_walk`, for the walk back."""
    return can_walk(q, k, do, state, SHARED_BACK)


@functools.cache
def _kernels(device: int, dtype: torch.dtype) -> tuple[CudaKernel, ...] | None:
    """The walk forward, the same that also keeps what backward needs, and where it fits the walk back; None, and one
    line in the log, where they do not compile or load.
    """
    try:
        with torch.cuda.device(device):
            forward = _module("walk.cu", dtype)
            kernels = tuple(
                CudaKernel(forward, name, THREADS, SHARED) for name in ("lattice_dec_walk", "lattice_dec_walk_saving")
            )
            if device_of(torch.empty(0, device="cuda")).shared < SHARED_BACK:
                return kernels
            back = _module("walk_back.cu", dtype)
            return *kernels, CudaKernel(back, "lattice_dec_walk_back", THREADS, SHARED_BACK)
    except (ImportError, RuntimeError, OSError) as error:
        logger.warning("lattice: Triton's kernels run, because those in CUDA C++ do not: %s", error)
        return None


def source(name: str) -> str:
    """The text of a file of `FOLDER`, after that of common.cu."""
    return (FOLDER / "common.cu").read_text() + (FOLDER / name).read_text()


def _module(name: str, dtype: torch.dtype):
    return load(source(name), (f"-DBF16={int(dtype == torch.bfloat16)}",))


def _wide(cu_seqlens: Tensor | None) -> Tensor | None:
    return None if cu_seqlens is None else cu_seqlens.long()


def walk(inputs, start, outputs, saved, saves: bool, cu_seqlens) -> None:
    """As `lattice_fwd_kernel` of "dec": fills o and the final tiles and, if `saves`, kept, h and p."""
    q, k, v, gamma = inputs
    kernel = _kernels(v.device.index, v.dtype)[int(saves)]
    saved = saved if saves else (None, None, None)
    with torch.cuda.device(v.device):
        kernel(
            start.shape[0], q, k, v, gamma.float(), start, *outputs, *saved, _wide(cu_seqlens), v.shape[1], v.shape[2]
        )


def walk_back(upstream, inputs, moves, states, grads, scratch, cu_seqlens) -> None:
    """As `lattice_adjoint_kernel`: fills dz, dalpha and the gradient of the first tiles."""
    (end, do), (q, k, gamma) = upstream, inputs
    h, p, hh, a, b = moves
    kernel = _kernels(q.device.index, q.dtype)[2]
    with torch.cuda.device(q.device):
        kernel(
            end.shape[0], end, do, q, k, gamma.float(), h, p, hh, a, b, *states, *grads, scratch, _wide(cu_seqlens),
            q.shape[1], q.shape[2],
        )  # fmt: skip
