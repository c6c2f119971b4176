"""Compiles the native.cpp of an op on first use, where a C++ compiler is installed, and loads it by ctypes.

The result is kept in a cache folder, so the next process only loads it. If there is no compiler, or if something
fails, the torch path runs; nothing is printed. The files include no header of torch or Python: one compiles in about a
second.

    HF_MEMMIX_CACHE    the cache folder; by default hf_memmix below XDG_CACHE_HOME, that is ~/.cache
    CXX                the compiler; by default c++, g++ or clang++, the first that is installed
"""

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import threading
from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).parent
COMPILERS = ("c++", "g++", "clang++")
SECONDS = 60  # a compiler that takes longer is stopped
# sums may be taken in any order, so that they use all lanes; NaN and infinity keep their meaning
FLAGS = (
    "-std=c++17", "-O3", "-fPIC", "-shared", "-fvisibility=hidden",
    "-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-fassociative-math",
)  # fmt: skip
# the instructions of this processor; the second choice is for compilers that do not know the option
TARGETS = (("-march=native",), ())
THREAD_WORK = 2_000_000  # operations from which a second thread is worth its start (about 0.1 ms)

logger = logging.getLogger(__name__)


class NativeError(RuntimeError):
    """The native code of an op cannot be compiled or loaded; the message says why."""


def compiler() -> str | None:
    """The path of the C++ compiler, or None."""
    if os.name != "posix":
        return None
    named = os.environ.get("CXX")
    return next(filter(None, map(shutil.which, [named] if named else COMPILERS)), None)


@functools.cache
def _processor() -> str:
    """What the code of -march=native depends on: caches may be shared by several machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    kept = {line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))}
    return "\n".join([platform.machine(), *sorted(kept)])


def cache_folder() -> Path:
    """Where compiled code is kept."""
    named = os.environ.get("HF_MEMMIX_CACHE")
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hf_memmix"


def _key(source: Path, command: str) -> str:
    found = os.stat(command)
    parts = [source.read_text(), (ROOT / "native.h").read_text(), repr((FLAGS, TARGETS)), _processor()]
    parts.append(f"{os.path.realpath(command)} {found.st_size} {found.st_mtime_ns}")
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def _compile(source: Path, target: Path, command: str):
    """Compile `source` to `target`, which appears only when it is complete: other processes may compile it too."""
    handle, scratch = tempfile.mkstemp(suffix=".so", dir=target.parent)
    os.close(handle)
    try:
        for options in TARGETS:
            done = subprocess.run(
                [command, *FLAGS, *options, str(source), "-o", scratch],
                stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=SECONDS,
            )  # fmt: skip
            if done.returncode == 0:
                os.replace(scratch, target)
                return
        raise NativeError(f"{command} cannot compile {source}:\n{done.stderr[-2000:]}")
    finally:
        Path(scratch).unlink(missing_ok=True)


def _load(op: str) -> ctypes.CDLL:
    """The compiled code of an op, from the cache or compiled now.

    Raises:
        NativeError: it cannot be compiled or loaded.
    """
    source, command = ROOT / op / "native.cpp", compiler()
    if command is None:
        raise NativeError(f"no C++ compiler ({', '.join(COMPILERS)}) is installed; install g++, or set CXX to one")
    try:
        name = f"{op}-{_key(source, command)}.so"
        try:
            folder = cache_folder()
            folder.mkdir(parents=True, exist_ok=True)
            if not (folder / name).is_file():
                _compile(source, folder / name, command)
            return ctypes.CDLL(str(folder / name))
        except (OSError, RuntimeError) as error:  # RuntimeError: there is no home folder
            if isinstance(error, NativeError):
                raise
            logger.info("hf_memmix: the cache folder cannot be used (%s), compiling for this process only", error)
        with tempfile.TemporaryDirectory(prefix="hf_memmix") as folder:  # a loaded file may be deleted
            _compile(source, Path(folder) / name, command)
            return ctypes.CDLL(str(Path(folder) / name))
    except (OSError, subprocess.SubprocessError) as error:
        raise NativeError(f"the native code of {op} cannot be compiled: {error}") from error


_loaded: dict[str, ctypes.CDLL | NativeError] = {}
_loading = threading.Lock()


def library(op: str, needed: bool = False) -> ctypes.CDLL | None:
    """The native code of an op, or None if this machine cannot compile it.

    Raises:
        NativeError: `needed`, and it cannot be compiled.
    """
    found = _loaded.get(op)
    if found is None:
        with _loading:
            if op not in _loaded:
                try:
                    _loaded[op] = _load(op)
                except NativeError as error:
                    logger.info("hf_memmix: %s; the torch path runs", error)
                    _loaded[op] = error
            found = _loaded[op]
    if isinstance(found, NativeError):
        if needed:
            raise found
        return None
    return found


# ---- calls

POINTER, INTEGER, REAL = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


def function(library: ctypes.CDLL, name: str, types: tuple):
    """A function of a library that returns nothing, with the types of its arguments."""
    found = getattr(library, name)
    if found.argtypes is None:
        found.argtypes, found.restype = types, None
    return found


def address(tensor: Tensor | None) -> int | None:
    """The address of the first element of a tensor; None for a null pointer."""
    return None if tensor is None else tensor.data_ptr()


def dense(tensor: Tensor | None, dtype: torch.dtype = torch.float32) -> Tensor | None:
    """The tensor, contiguous and of this dtype."""
    # a decode step is short: asking first takes less time than two calls that have nothing to do
    if tensor is None or (tensor.dtype == dtype and tensor.is_contiguous()):
        return tensor
    return tensor.to(dtype).contiguous()


def pages_of(state_indices: Tensor | None) -> Tensor | None:
    """The pages as int64, or None."""
    return None if state_indices is None else state_indices.long()


def over_rows(call, rows: int, work: float):
    """`call(first, last)` on parts of `rows` in as many threads as torch uses; ctypes releases Python's lock.

    `work` is the number of operations of all rows. Small work runs in this thread.
    """
    threads = min(rows, torch.get_num_threads(), int(work / THREAD_WORK) + 1)
    if threads <= 1:
        call(0, rows)
        return
    bounds = [rows * i // threads for i in range(threads + 1)]
    others = [threading.Thread(target=call, args=part) for part in zip(bounds[1:-1], bounds[2:], strict=True)]
    for thread in others:
        thread.start()
    call(bounds[0], bounds[1])
    for thread in others:
        thread.join()


def starts_of(batch: int, length: int, cu_seqlens: Tensor | None) -> Tensor:
    """Boundaries [N + 1] of the sequences in the flattened tokens, int64."""
    return _equal_starts(batch, length) if cu_seqlens is None else cu_seqlens.long().contiguous()


@functools.lru_cache(maxsize=64)
def _equal_starts(batch: int, length: int) -> Tensor:
    return torch.arange(batch + 1) * length
