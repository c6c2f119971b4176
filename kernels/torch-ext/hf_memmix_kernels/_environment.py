"""The environment variables of this package. Every other module asks here.

| variable | values | meaning |
|---|---|---|
| HF_MEMMIX_BACKEND | torch, triton, native | the path of every op; unset, the device decides (`_dispatch`) |
| HF_MEMMIX_NVRTC | 0 | no kernels in CUDA C++; Triton's run in their place (`_cuda`) |
| HF_MEMMIX_TAPES | 0 | launches are not taped (`_tape`); read at import |
| HF_MEMMIX_CACHE | a folder | compiled native code; by default hf_memmix in XDG_CACHE_HOME, that is ~/.cache |
| CXX | a compiler | of native code; by default the first of c++, g++ and clang++ that is installed |
| TRITON_INTERPRET | 1 | Triton's: kernels run on a CPU, in its interpreter; read by Triton at import |
"""

import os
from pathlib import Path

try:  # the dictionary below os.environ: a look-up that fails takes a tenth of the time, and every call of an op asks
    from posix import environ as _environment

    _BACKEND = b"HF_MEMMIX_BACKEND"
except ImportError:
    from os import environ as _environment

    _BACKEND = "HF_MEMMIX_BACKEND"


def backend() -> str | None:
    """The path that the user wants, unchecked; None where the device decides."""
    return os.environ["HF_MEMMIX_BACKEND"] if _BACKEND in _environment else None


def wants_nvrtc() -> bool:
    return os.environ.get("HF_MEMMIX_NVRTC") != "0"


def wants_tapes() -> bool:
    return os.environ.get("HF_MEMMIX_TAPES") != "0"


def cache_folder() -> Path:
    """Where compiled native code is kept."""
    if named := os.environ.get("HF_MEMMIX_CACHE"):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hf_memmix"


def compiler() -> str | None:
    """The C++ compiler that the user names, or None."""
    return os.environ.get("CXX") or None


def interprets() -> bool:
    """Whether Triton's kernels run in its interpreter."""
    return os.environ.get("TRITON_INTERPRET") == "1"
