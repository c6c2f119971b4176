"""A lock, so that only one process at a time works in a folder. A second process gets an error that names the first.

It is a lock of the operating system on a file beside the folder. When a process is killed, its lock ends. The content
of the file names the process.
"""

import contextlib
import errno
import json
import os
import socket
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from hf_memmix import launch
from hf_memmix.conversion.saving import check_target, explain_write_errors, place_of, remove_folder
from hf_memmix.errors import UserError
from hf_memmix.operating_system import WINDOWS, try_lock

PARTIAL_FILE = "unfinished.json"  # in the folder of a teacher's cache that is being written

_held: set[tuple[int, Path]] = set()  # with the process id, because a forked process has a copy of the set


def lock_file(folder: str | Path) -> Path:
    """The lock file of a run folder."""
    folder = Path(folder).absolute()
    return folder.with_name(f".{folder.name.lstrip('.')}.lock")


@contextlib.contextmanager
def run_lock(folder: str | Path) -> Iterator[None]:
    """Hold the lock of a run folder. The process that holds it may take it again.

    If a launch (`accelerate launch`) has several processes, rank 0 takes it for all.

    Raises:
        ValueError: another process holds it; the message has the process id, the host and the time.
    """
    path = lock_file(folder)
    held = (os.getpid(), path)
    if held in _held or not launch.is_first():
        yield
        return
    with explain_write_errors(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = _acquire(path, folder)
    _held.add(held)
    try:
        yield
    finally:
        _held.discard(held)
        with contextlib.suppress(OSError):
            path.unlink()  # before unlocking: a process that has opened the file notices it and opens a new one
        os.close(handle)
        if WINDOWS:  # it removes no open file, so not that of a process that has opened it meanwhile
            with contextlib.suppress(OSError):
                path.unlink()


def _acquire(path: Path, folder: str | Path) -> int:
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            try_lock(handle)
        except OSError as error:
            holder = os.read(handle, 1000)
            os.close(handle)
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                raise UserError(
                    f"cannot lock {str(path)!r} ({error.strerror}); use a file system with locks"
                ) from None
            raise UserError(
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
        return "its process id is not known yet"


def check_run_target(out_dir: str | Path, overwrite: bool = False) -> None:
    """As `check_target`, long before `run_folder` is entered, which decides if an earlier run has left its folder."""
    if not _run_dir(Path(out_dir)).exists():
        check_target(out_dir, overwrite)


def _run_dir(out_dir: Path) -> Path:
    out_dir = place_of(out_dir)
    return out_dir.with_name(f".{out_dir.name}.run")


@contextlib.contextmanager
def run_folder(out_dir: str | Path, resume: bool = True, overwrite: bool = False) -> Iterator[Path]:
    """A locked folder beside the output `out_dir`, in which a command keeps checkpoints until the output is written.

    After an exception or a kill the folder stays, so that the same command can continue, unless it is empty. Otherwise
    it is removed at the end. Without `resume`, an existing one is removed first.

    Raises:
        ValueError: another process works there, or the output may not be written.
    """
    out_dir = place_of(out_dir)
    folder = _run_dir(out_dir)
    with run_lock(folder):
        try:
            check_target(out_dir, overwrite)
        except ValueError:
            if _is_leftover(folder, out_dir):
                remove_folder(folder, beside=out_dir)
            raise
        if not resume and not launch.is_launched():  # with several processes, another one may be reading it
            remove_folder(folder, beside=out_dir)
        try:
            yield folder
        except BaseException:
            remove_empty(folder)
            raise
        if launch.is_first():
            remove_folder(folder, beside=out_dir)


def remove_empty(folder: Path) -> None:
    """Remove a folder if it is there and empty."""
    with contextlib.suppress(OSError):
        folder.rmdir()


def _is_leftover(folder: Path, out_dir: Path) -> bool:
    """Whether a process was killed after it had written the output, but before it removed its run folder.

    Then the output is newer than the run folder, and the run in the folder is complete.
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
        state = json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
        return state["global_step"] >= state["max_steps"]
    except (OSError, ValueError, KeyError, TypeError):
        return False
