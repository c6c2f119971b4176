"""Launch of the walk back of "dec" in CUDA C++ (kernels/sequential/walk_back.cu), in the place of Triton's kernel."""

import functools
import logging
from pathlib import Path

import torch
from torch import Tensor

from .._cuda import CudaKernel, has_nvrtc, load
from .._device import has_ptx
from .._tape import ALIGNED

SOURCE = Path(__file__).parent / "kernels" / "sequential" / "walk_back.cu"
# number and size of the slots, and warps per program, as in walk_back.cu
SIZE, WARPS = 64, 4
# bytes of `Shared` in walk_back.cu: twice the inputs of 32 tokens, and two sums over warps
SHARED_BACK = 2 * 32 * (4 * SIZE * 4 + 3 * SIZE * 2 + 2 * 4) + 2 * WARPS * SIZE * 4
logger = logging.getLogger(__name__)


def can_walk_back(q: Tensor, k: Tensor, do: Tensor, state: Tensor) -> bool:
    """Whether this kernel exists for such inputs: 64 slots of size 64, all inputs in the same 16 bits. It fits the
    shared memory of every GPU on which the op runs Triton.
    """
    return (
        has_ptx(do)
        and do.dtype in (torch.bfloat16, torch.float16)
        and q.dtype == k.dtype == do.dtype
        and tuple(state.shape[2:]) == (SIZE, SIZE)
        and has_nvrtc()
        and _kernel(do.device.index, do.dtype) is not None
    )


@functools.cache
def _kernel(device: int, dtype: torch.dtype) -> CudaKernel | None:
    """The kernel on a GPU; None, and one line in the log, where it does not compile or load."""
    try:
        with torch.cuda.device(device):
            module = load(SOURCE.read_text(encoding="utf-8"), (f"-DBF16={int(dtype == torch.bfloat16)}",))
            return CudaKernel(module, "lattice_dec_walk_back", 32 * WARPS, SHARED_BACK)
    except Exception as error:  # other versions of cuda-bindings may lack a name or take other arguments
        logger.warning("lattice: Triton's kernel runs, because that in CUDA C++ does not: %s", error)
        return None


def _wide(cu_seqlens: Tensor | None) -> Tensor | None:
    return None if cu_seqlens is None else cu_seqlens.long()


def _aligned(x: Tensor) -> Tensor:
    """x, or a copy if its address is not one that loads of 16 bytes can take: a view may begin anywhere."""
    return x if x.data_ptr() % ALIGNED == 0 else x.clone()


def walk_back(upstream, inputs, moves, states, grads, scratch, cu_seqlens) -> None:
    """As `lattice_adjoint_kernel`: fills dz, dalpha and the gradient of the first tiles."""
    (end, do), (q, k, gamma) = upstream, inputs
    read = [_aligned(x) for x in (end, do, q, k, gamma.float(), *moves)]
    kernel = _kernel(q.device.index, q.dtype)
    with torch.cuda.device(q.device):
        kernel(end.shape[0], *read, *states, *grads, scratch, _wide(cu_seqlens), q.shape[1], q.shape[2])
