"""Launches of the two walks of "dec" in CUDA C++ (kernels/sequential/walks.cu), in the place of Triton's kernels."""

import functools
import logging
from pathlib import Path

import torch
from torch import Tensor

from .._cuda import CudaKernel, has_nvrtc, load
from .._device import has_ptx

SOURCE = Path(__file__).parent / "kernels" / "sequential" / "walks.cu"
# number and size of the slots, and warps per program, as in walks.cu
SIZE, WARPS = 64, 4
# bytes of `Shared` in walks.cu: twice the inputs of 32 tokens, and two sums over warps
SHARED_BACK = 2 * 32 * (4 * SIZE * 4 + 3 * SIZE * 2 + 2 * 4) + 2 * WARPS * SIZE * 4
logger = logging.getLogger(__name__)


def can_walk(q: Tensor, k: Tensor, v: Tensor, state: Tensor) -> bool:
    """Whether these kernels exist for such inputs: 64 slots of size 64, all inputs in the same 16 bits. They fit the
    shared memory of every GPU on which the op runs Triton.
    """
    return (
        has_ptx(v)
        and v.dtype in (torch.bfloat16, torch.float16)
        and q.dtype == k.dtype == v.dtype
        and tuple(state.shape[2:]) == (SIZE, SIZE)
        and has_nvrtc()
        and _kernels(v.device.index, v.dtype) is not None
    )


@functools.cache
def _kernels(device: int, dtype: torch.dtype) -> tuple[CudaKernel, ...] | None:
    """The walk forward, the same that also keeps what backward needs, and the walk back; None, and one line in the
    log, where they do not compile or load.
    """
    try:
        with torch.cuda.device(device):
            module = load(SOURCE.read_text(), (f"-DBF16={int(dtype == torch.bfloat16)}",))
            return (
                CudaKernel(module, "lattice_dec_walk", 32 * WARPS),
                CudaKernel(module, "lattice_dec_walk_saving", 32 * WARPS),
                CudaKernel(module, "lattice_dec_walk_back", 32 * WARPS, SHARED_BACK),
            )
    except (ImportError, RuntimeError, OSError) as error:
        logger.warning("lattice: Triton's kernels run, because those in CUDA C++ do not: %s", error)
        return None


def _wide(cu_seqlens: Tensor | None) -> Tensor | None:
    return None if cu_seqlens is None else cu_seqlens.long()


def rows_of_heads(v: Tensor) -> Tensor:
    """v [B, T, H, d] with the heads of a token side by side and tokens at equal distances, as `walk` reads it: v
    itself if it is so, as a part of a product with other columns is, else a copy.
    """
    B, T, H, d = v.shape
    fits = v.stride(3) == 1 and v.stride(2) == d and (B == 1 or v.stride(0) == T * v.stride(1))
    aligned = v.stride(1) % 8 == 0 and v.data_ptr() % 16 == 0
    return v if fits and aligned and v.stride(1) < 2**31 else v.contiguous()


def walk(inputs, start, outputs, saved, saves: bool, cu_seqlens) -> None:
    """As `lattice_fwd_kernel` of "dec": fills o and the final tiles and, if `saves`, kept, h and p. v need not be
    contiguous, see `rows_of_heads`.
    """
    q, k, v, gamma = inputs
    kernel = _kernels(v.device.index, v.dtype)[int(saves)]
    saved = saved if saves else (None, None, None)
    with torch.cuda.device(v.device):
        kernel(
            start.shape[0], q, k, v, gamma.float(), start, *outputs, *saved, _wide(cu_seqlens), v.shape[1], v.shape[2],
            v.stride(1),
        )  # fmt: skip


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
