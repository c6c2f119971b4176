"""One process at a time works in a folder: the second is told who does. A lock dies with the process that holds it.

The lock is the kernel's own on a file beside the folder (POSIX record locks, which NFS has too and forked workers do
not inherit), so a killed run leaves nothing to clear away; the file only says who holds it.
"""

import contextlib
import errno
import fcntl
import json
import os
import socket
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from hf_memmix.conversion.saving import check_target, remove_folder

PARTIAL_FILE = "unfinished.json"  # in the folder of a teacher's cache that is being written

_held: set[Path] = set()


def lock_file(folder: str | Path) -> Path:
    """Where the lock of a run folder lies."""
    folder = Path(folder).absolute()
    return folder.with_name(f".{folder.name.lstrip('.')}.lock")


@contextlib.contextmanager
def run_lock(folder: str | Path) -> Iterator[None]:
    """Hold the lock of a run folder; within one process it may be taken again while it is held.

    Of several processes of one launch (`accelerate launch`) rank 0 takes it for all.
    Raises ValueError, with process, host and time, if another process holds it.
    """
    path = lock_file(folder)
    if path in _held or int(os.environ.get("RANK", "0")):
        yield
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = _acquire(path, folder)
    _held.add(path)
    try:
        yield
    finally:
        _held.discard(path)
        with contextlib.suppress(OSError):
            path.unlink()  # before it is free: whoever has opened it sees that and opens it again
        os.close(handle)


def _acquire(path: Path, folder: str | Path) -> int:
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.read(handle, 1000)
            os.close(handle)
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                raise ValueError(
                    f"cannot lock {str(path)!r} ({error.strerror}); use a file system with locks"
                ) from None
            raise ValueError(
                f"another process works in {str(folder)!r}: {_holder_text(holder)}. Wait for it or end it, or give"
                " another output folder"
            ) from None
        if os.fstat(handle).st_nlink:
            break
        os.close(handle)  # its holder has just ended and removed it
    record = {"pid": os.getpid(), "host": socket.gethostname(), "since": datetime.now().isoformat(" ", "seconds")}
    os.ftruncate(handle, 0)
    os.write(handle, json.dumps(record).encode())
    return handle


def _holder_text(holder: bytes) -> str:
    try:
        record = json.loads(holder)
        return f"process {record['pid']} on {record['host']}, since {record['since']}"
    except (ValueError, KeyError, TypeError):
        return "it has not yet said which"


@contextlib.contextmanager
def run_folder(out_dir: str | Path, resume: bool = True, overwrite: bool = False) -> Iterator[Path]:
    """The locked folder, beside the output `out_dir`, in which a command keeps its checkpoints until that is written.

    It outlives an exception or a kill, so that the same command continues from there, and vanishes otherwise; without
    `resume` what is there is removed first.
    Raises ValueError if another process works there, or if the output may not be written.
    """
    out_dir = Path(out_dir).absolute()
    folder = out_dir.with_name(f".{out_dir.name}.run")
    with run_lock(folder):
        try:
            check_target(out_dir, overwrite)
        except ValueError:
            if _is_leftover(folder, out_dir):
                remove_folder(folder, beside=out_dir)
            raise
        if not resume and "WORLD_SIZE" not in os.environ:  # of several processes none may find what another removes
            remove_folder(folder, beside=out_dir)
        yield folder
        if not int(os.environ.get("RANK", "0")):
            remove_folder(folder, beside=out_dir)


def _is_leftover(folder: Path, out_dir: Path) -> bool:
    """Whether a kill came between the appearance of the output and the removal of its run folder.

    Then the output is the newer of the two, and nothing in the run folder waits to be continued.
    """
    written = [path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()]
    finished = [path.stat().st_mtime_ns for path in out_dir.rglob("*") if path.is_file()]
    if not folder.is_dir() or not finished or max(written, default=0) > max(finished):
        return False
    checkpoints = list(folder.glob("checkpoint-*"))
    return not (folder / PARTIAL_FILE).exists() and (not checkpoints or any(map(_is_complete, checkpoints)))


def _is_complete(checkpoint: Path) -> bool:
    """Whether a checkpoint is that of the last step."""
    try:
        state = json.loads((checkpoint / "trainer_state.json").read_text())
        return state["global_step"] >= state["max_steps"]
    except (OSError, ValueError, KeyError, TypeError):
        return False
