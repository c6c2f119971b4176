"""Kernels in CUDA C++. NVRTC compiles them for the GPU at hand when they are first used; no compiler needs to be
installed. `HF_MEMMIX_NVRTC=0` switches them off.

torch's wheels for CUDA bring NVRTC and cuda-bindings along. Where one is missing, or on a GPU that is not NVIDIA's,
there are no such kernels, and ops launch their Triton kernels instead.
"""

import ctypes
import functools
import hashlib
import logging
from pathlib import Path

import torch
from torch import Tensor

from . import _environment
from ._device import of_index

logger = logging.getLogger(__name__)
LAUNCHED_AS = {int: ctypes.c_int, float: ctypes.c_float}


def _checked(result: tuple, what: str):
    """The value of a call of cuda-bindings, which returns (status, value); RuntimeError if the status is not 0."""
    status, *values = result
    if int(status):
        raise RuntimeError(f"{what}: {status!r}")
    return values[0] if values else None


def compile_cubin(source: str, options: tuple[str, ...]) -> bytes:
    """Machine code of CUDA C++ for the current GPU, from Triton's cache on disk if it was compiled before.

    Raises:
        ImportError, RuntimeError: cuda-bindings or NVRTC is missing, or the source does not compile; with its log.
    """
    from cuda.bindings import nvrtc
    from triton.runtime.cache import get_cache_manager

    options = (f"--gpu-architecture={of_index(torch.cuda.current_device()).arch}", "-std=c++17", *options)
    version = _checked((lambda status, *parts: (status, parts))(*nvrtc.nvrtcVersion()), "nvrtcVersion")
    cache = get_cache_manager(hashlib.sha256(repr((source, options, version)).encode()).hexdigest())
    if (found := cache.get_file("kernels.cubin")) is not None:
        return Path(found).read_bytes()
    program = _checked(nvrtc.nvrtcCreateProgram(source.encode(), b"kernels.cu", 0, [], []), "nvrtcCreateProgram")
    status, *_ = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    if int(status):
        log = b" " * _checked(nvrtc.nvrtcGetProgramLogSize(program), "nvrtcGetProgramLogSize")
        nvrtc.nvrtcGetProgramLog(program, log)
        raise RuntimeError(f"NVRTC does not compile the kernels: {log.decode()}")
    cubin = b" " * _checked(nvrtc.nvrtcGetCUBINSize(program), "nvrtcGetCUBINSize")
    _checked(nvrtc.nvrtcGetCUBIN(program, cubin), "nvrtcGetCUBIN")
    nvrtc.nvrtcDestroyProgram(program)
    cache.put(cubin, "kernels.cubin")
    return cubin


class CudaKernel:
    """One kernel of a module that is loaded on the current GPU.

    Args:
        module: as `load` returns it.
        name: the kernel's name; `extern "C"` in the source.
        threads: per program.
        shared: bytes of dynamic shared memory per program.
    """

    def __init__(self, module, name: str, threads: int, shared: int = 0):
        from cuda.bindings import driver

        self._launch, self.threads, self.shared = driver.cuLaunchKernel, threads, shared
        self.function = _checked(driver.cuModuleGetFunction(module, name.encode()), "cuModuleGetFunction")
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _checked(driver.cuFuncSetAttribute(self.function, attribute, shared), "cuFuncSetAttribute")

    def __call__(self, programs: int, *args: Tensor | int | float | None) -> None:
        """Launch on torch's current stream. A tensor is passed as its address, None as a null pointer."""
        from ._recorder import refuse

        refuse("a kernel in CUDA C++")
        values = tuple(0 if x is None else x.data_ptr() if isinstance(x, Tensor) else x for x in args)
        kinds = tuple(LAUNCHED_AS.get(type(x), ctypes.c_void_p) for x in args)
        stream = torch.cuda.current_stream().cuda_stream
        _checked(
            self._launch(self.function, programs, 1, 1, self.threads, 1, 1, self.shared, stream, (values, kinds), 0),
            "cuLaunchKernel",
        )


def load(source: str, options: tuple[str, ...]):
    """The compiled module on the current GPU; as `compile_cubin`."""
    from cuda.bindings import driver

    cubin = compile_cubin(source, options)
    torch.cuda.current_stream()  # torch's context is then the current one
    return _checked(driver.cuModuleLoadData(cubin), "cuModuleLoadData")


@functools.cache
def has_nvrtc() -> bool:
    """Whether kernels in CUDA C++ can be used."""
    if torch.version.cuda is None or not _environment.wants_nvrtc() or not torch.cuda.is_available():
        return False
    try:
        from cuda.bindings import driver, nvrtc

        return not int(nvrtc.nvrtcVersion()[0]) and driver is not None
    except Exception as error:  # cuda-bindings raises errors of several kinds where a library is missing
        logger.info("kernels in CUDA C++ are not used: %s", error)
        return False
