"""Compiles the native.cpp of an op on first use, where a C++ compiler is installed, and loads it by ctypes.

The result is kept in a cache folder, so the next process only loads it. If there is no compiler, or if something
fails, the torch path runs; nothing is printed. The files include no header of torch or Python: one compiles in about a
second. `_environment` has the variables that name the compiler and the cache folder.
"""

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from . import _environment

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
# keys of /proc/cpuinfo, in lower case: x86, Arm, POWER, s390x and RISC-V
PROCESSOR_LINES = {"model name", "flags", "features", "cpu implementer", "cpu part", "cpu", "machine", "isa", "uarch"}
ACTIVATIONS = (None, "silu", "gelu", "sigmoid")  # in the order of native.h
THREAD_WORK = 2_000_000  # operations from which a second thread is worth its start (about 0.1 ms)

logger = logging.getLogger(__name__)


class NativeError(RuntimeError):
    """The native code of an op cannot be compiled or loaded; the message says why."""


def compiler() -> str | None:
    """The path of the C++ compiler, or None."""
    if os.name != "posix":
        return None
    named = _environment.compiler()
    if sys.platform == "darwin" and not named and not Path("/Library/Developer/CommandLineTools").exists():
        return None  # /usr/bin/c++ is there without a compiler, and opens a window that offers to install one
    return next(filter(None, map(shutil.which, [named] if named else COMPILERS)), None)


@functools.cache
def _processor() -> str:
    """What the code of -march=native depends on: caches may be shared by several machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    kept = {line for line in lines if line.partition(":")[0].strip().lower() in PROCESSOR_LINES}
    return "\n".join([platform.machine(), *sorted(kept)])


def _own_folder() -> Path:
    """The folder of this user in the cache folder, which several users may share.

    Raises:
        OSError: it cannot be made, or somebody else could put code there.
    """
    folder = _environment.cache_folder() / f"native-{os.getuid()}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise PermissionError(f"{folder} belongs to another user, or others can write it")
    return folder


def _key(source: Path, command: str) -> str:
    found = os.stat(command)
    parts = [file.read_bytes() for file in (source, *sorted(ROOT.glob("*.h")))]
    settings = repr((FLAGS, TARGETS, os.path.realpath(command), found.st_size, found.st_mtime_ns))
    parts += [text.encode(errors="surrogateescape") for text in (settings, _processor())]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:24]


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16]


def _kept(folder: Path, name: str) -> Path | None:
    """The complete file of this name in the folder: the loader would crash the process on one that was cut off."""
    for file in sorted(folder.glob(f"{name}-*.so")):
        if file.stem == f"{name}-{_digest(file)}":
            return file
        file.unlink(missing_ok=True)
    return None


def _run(command: list[str]) -> tuple[str, int]:
    """Stderr and exit status of a compiler.

    Raises:
        subprocess.TimeoutExpired: it took longer than SECONDS. It is ended with all its children, which keep the
            pipe open: `subprocess.run` would wait for them.
    """
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        errors="replace", start_new_session=True,
    )  # fmt: skip
    with process:
        try:
            return process.communicate(timeout=SECONDS)[1], process.returncode
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise


def compile_source(source: Path, folder: Path, name: str, command: str) -> Path:
    """Compile `source` to a file of `folder`, which appears when it is complete: others may compile it, too.

    Args:
        name: the file's name begins with it.
        command: the path of the compiler.

    Raises:
        NativeError: it cannot be compiled.
    """
    handle, scratch = tempfile.mkstemp(prefix="compiling-", suffix=".tmp", dir=folder)
    os.close(handle)
    try:
        for options in TARGETS:
            message, status = _run([command, *FLAGS, *options, str(source), "-o", scratch])
            if status == 0:
                target = folder / f"{name}-{_digest(Path(scratch))}.so"
                os.replace(scratch, target)
                return target
        raise NativeError(f"{command} cannot compile {source}:\n{message[-2000:]}")
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
        name = f"{op}-{_key(source, command)}"
        try:
            folder = _own_folder()
            return ctypes.CDLL(str(_kept(folder, name) or compile_source(source, folder, name, command)))
        except (OSError, RuntimeError) as error:  # RuntimeError: there is no home folder
            if isinstance(error, NativeError):
                raise
            logger.info("hf_memmix: the cache folder cannot be used (%s), compiling for this process only", error)
        with tempfile.TemporaryDirectory(prefix="hf_memmix") as folder:  # a loaded file may be deleted
            return ctypes.CDLL(str(compile_source(source, Path(folder), name, command)))
    except (OSError, subprocess.SubprocessError) as error:
        raise NativeError(f"the native code of {op} cannot be compiled: {error}") from error


_loaded: dict[str, ctypes.CDLL | NativeError] = {}
_loading = threading.Lock()
if hasattr(os, "register_at_fork"):  # a child would wait for ever for a thread that only its parent has
    os.register_at_fork(before=_loading.acquire, after_in_parent=_loading.release, after_in_child=_loading.release)


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


class Library(NamedTuple):
    """The native code of an op, as a group of the arguments of a function under `flat`."""

    library: ctypes.CDLL


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


def empty(*shape: int) -> Tensor:
    """A new float32 tensor on the CPU, whatever the default dtype and device are."""
    return torch.empty(shape, dtype=torch.float32, device="cpu")


def zeros(*shape: int) -> Tensor:
    """Zeros, else as `empty`."""
    return torch.zeros(shape, dtype=torch.float32, device="cpu")


def pages_of(state_indices: Tensor | None, pages: int) -> Tensor | None:
    """The pages as contiguous int64, or None; each must be one of the `pages` of a pool.

    Raises:
        IndexError: there is no such page.
    """
    if state_indices is None:
        return None
    for page in state_indices.tolist():
        if not 0 <= page < pages:
            raise IndexError(f"state_indices has the page {page}, the pool has the pages 0 to {pages - 1}")
    return state_indices.long().contiguous()


def changed(*states: Tensor) -> None:
    """Tell autograd that native code wrote these tensors: it then refuses a backward pass that needs the old ones."""
    torch.autograd.graph.increment_version(states)


_TASK = ctypes.CFUNCTYPE(None, POINTER)


@functools.cache
def _in_torchs_threads():
    """`GOMP_parallel(task, data, threads, flags)` of the OpenMP that torch uses; None if it uses another one."""
    try:
        found = ctypes.CDLL(torch._C.__file__).GOMP_parallel
    except (OSError, AttributeError):
        return None
    found.argtypes, found.restype = (_TASK, POINTER, ctypes.c_uint, ctypes.c_uint), None
    return found


def over_rows(call, rows: int, work: float):
    """`call(first, last)` on parts of `rows` in as many threads as torch uses; ctypes releases Python's lock.

    They are torch's own threads where that is possible: after an operator of torch, these wait in a loop for some
    milliseconds, and take the processor from any other thread. `work` is the number of operations of all rows. Small
    work runs in this thread.
    """
    count = min(rows, torch.get_num_threads(), int(work / THREAD_WORK) + 1)
    if count <= 1:
        call(0, rows)
        return
    bounds = [rows * i // count for i in range(count + 1)]
    parts, errors = list(zip(bounds[:-1], bounds[1:], strict=True)), []

    def task(_=None):
        try:
            while parts:
                call(*parts.pop())
        except IndexError:  # another thread has taken the last part
            pass
        except BaseException as error:  # an interrupt: ctypes would only print it
            errors.append(error)

    if parallel := _in_torchs_threads():
        # always torch's number: OpenMP would end the others, and start them for the next operator
        parallel(_TASK(task), None, torch.get_num_threads(), 0)
    else:
        others = [threading.Thread(target=task) for _ in range(count - 1)]
        for thread in others:
            thread.start()
        task()
        for thread in others:
            thread.join()
    if errors:
        raise errors[0]


def starts_of(batch: int, length: int, cu_seqlens: Tensor | None) -> Tensor:
    """Boundaries [N + 1] of the sequences in the flattened tokens, int64.

    Raises:
        ValueError: packed boundaries that fall, or lie outside of the tokens.
    """
    if cu_seqlens is None:
        return _equal_starts(batch, length)
    starts = cu_seqlens.to("cpu", torch.int64).contiguous()
    if starts[0] < 0 or starts[-1] > length or (starts.diff() < 0).any():
        raise ValueError(f"cu_seqlens must rise from 0 to the number of tokens, {length}, got {starts.tolist()}")
    return starts


@functools.lru_cache(maxsize=64)
def _equal_starts(batch: int, length: int) -> Tensor:
    return torch.arange(batch + 1, device="cpu") * length
