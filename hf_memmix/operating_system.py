"""What Linux, macOS and Windows do in different ways: locks, positions in files, flushing, processes and their memory.

No other module of hf_memmix, hf_memmix.conversion and hf_memmix.training uses a function that one of the three lacks.
It imports the standard library only.
"""

import ctypes
import os
import sys
import threading
from contextlib import suppress
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    import msvcrt

    fcntl = None

WINDOWS = os.name == "nt"
# the byte that is locked on Windows, where nobody else can read a locked byte: it is behind the content of every file
_LOCKED_BYTE = 2**30
_positions = threading.Lock()
flush_data = getattr(os, "fdatasync", os.fsync)  # of a file descriptor; only Linux has the first one


def try_lock(handle: int):
    """Lock a file for this process; forked processes do not have the lock.

    On POSIX systems it is a record lock, which also works on NFS. The lock ends with the process.

    Args:
        handle: the descriptor of a file that is open for reading and writing.

    Raises:
        OSError: with EACCES or EAGAIN, another process has locked it; with any other number, locks do not work here.
    """
    if fcntl is not None:
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return
    place = os.lseek(handle, 0, os.SEEK_CUR)
    os.lseek(handle, _LOCKED_BYTE, os.SEEK_SET)
    try:
        msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
    finally:
        os.lseek(handle, place, os.SEEK_SET)


def read_at(handle: int, into: memoryview, place: int) -> int:
    """Read bytes of an open file from a position into memory, and return their number: 0 at the end of the file.

    Several threads may call it for one file.
    """
    if hasattr(os, "preadv"):
        return os.preadv(handle, [into], place)
    with _positions:
        os.lseek(handle, place, os.SEEK_SET)
        data = os.read(handle, len(into))
    into[: len(data)] = data
    return len(data)


def write_at(handle: int, data: memoryview, place: int):
    """Write bytes to a position of an open file. Several threads may call it for one file."""
    while data:
        if hasattr(os, "pwrite"):
            written = os.pwrite(handle, data, place)
        else:
            with _positions:
                os.lseek(handle, place, os.SEEK_SET)
                written = os.write(handle, data)
        data, place = data[written:], place + written


def flush(path: str | Path):
    """Wait until a file is on the disk, or what a folder holds. Windows can do this for files only, and writes folders
    by itself.
    """
    if WINDOWS and os.path.isdir(path):
        return
    handle = os.open(path, os.O_RDWR if WINDOWS else os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def forget_cached(path: str | Path):
    """Let the next reader of a file wait for the disk. Only Linux can: elsewhere it may be read from the memory."""
    if not hasattr(os, "posix_fadvise"):
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(handle)


def exchange(one: Path, other: Path) -> bool:
    """Swap the names of two folders in one step. False if that is impossible: Linux can, on most file systems."""
    libc = _libc()
    if not hasattr(libc, "renameat2"):
        return False
    here, swap = -100, 2  # AT_FDCWD and RENAME_EXCHANGE
    return libc.renameat2(here, os.fsencode(one), here, os.fsencode(other), swap) == 0


def is_running(pid: int) -> bool:
    """Whether a process of this machine has not ended. On Windows a signal 0 would be Ctrl-C, so it is asked for."""
    if WINDOWS:
        return _is_running_on_windows(pid)
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def release_memory():
    """Give memory that the C library keeps back to the system, where it can: glibc."""
    libc = _libc()
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def reset_peak() -> int:
    """Measure the peak memory of this process anew, and return its memory of now, in bytes.

    Only Linux can; elsewhere the peak stays that of the whole process until now.
    """
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return peak_memory()


def peak_memory() -> int:
    """Peak memory of this process in bytes."""
    if WINDOWS:
        return _peak_memory_on_windows()
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _libc() -> ctypes.CDLL | None:
    return ctypes.CDLL(None) if sys.platform == "linux" else None


def _is_running_on_windows(pid: int) -> bool:
    may_ask, denied, still_active = 0x1000, 5, 259  # PROCESS_QUERY_LIMITED_INFORMATION, ERROR_ACCESS_DENIED
    kernel32 = ctypes.WinDLL("kernel32", use_last_error=True)
    kernel32.OpenProcess.restype = ctypes.c_void_p
    handle = kernel32.OpenProcess(may_ask, False, pid)
    if not handle:
        return ctypes.get_last_error() == denied
    try:
        status = ctypes.c_uint32()
        kernel32.GetExitCodeProcess(ctypes.c_void_p(handle), ctypes.byref(status))
        return status.value == still_active
    finally:
        kernel32.CloseHandle(ctypes.c_void_p(handle))


class _Counters(ctypes.Structure):  # PROCESS_MEMORY_COUNTERS
    _fields_ = (
        ("size", ctypes.c_uint32),
        ("faults", ctypes.c_uint32),
        ("peak", ctypes.c_size_t),
        ("others", ctypes.c_size_t * 7),
    )


def _peak_memory_on_windows() -> int:
    counters = _Counters(size=ctypes.sizeof(_Counters))
    this_process = ctypes.c_void_p(-1)
    ctypes.WinDLL("kernel32").K32GetProcessMemoryInfo(this_process, ctypes.byref(counters), counters.size)
    return counters.peak
