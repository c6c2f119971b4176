"""Folders that are written atomically: written under a temporary name, flushed to disk, then renamed.

Temporary folders have the host and the process id in their names. If a process is killed, the next command that writes
to the same place removes what it left.
"""

import errno
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from hf_memmix.conversion.written import check_replaceable, mark_folder
from hf_memmix.errors import UserError
from hf_memmix.operating_system import WINDOWS, exchange, flush, is_running

FREE_PLACE = "remove it, choose another folder, or replace it (--overwrite; overwrite=True in Python)"
OTHER_FOLDER = "Give another folder"
DENIED = "This user may not write there: change the permissions, or give another folder"
SHARD_SIZE = "5GB"  # largest weight file of a saved model, as on the Hub
# a failed write of torch.save raises a plain RuntimeError; these texts identify it
_TORCH_WRITE_ERRORS = ("PytorchStreamWriter", "iostream error")
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_DENIED = (errno.EACCES, errno.EPERM, errno.EROFS)


def check_target(path: str | Path, overwrite: bool = False) -> Path:
    """`place_of` a folder that may be written to. Call it before the long work, not after it.

    Leftovers of killed processes beside the folder are removed. Raises ValueError if `path` is a file or is not empty,
    or if this user may not write beside it.
    With `overwrite` it may be a folder that this tool has written (`conversion.written`), but not the current folder.
    """
    path = place_of(path)
    remove_leftovers(path)
    for part in (path, *path.parents):
        if part.exists() and not part.is_dir():
            raise UserError(f"{str(part)!r} is a file; give a folder to write to")
    if not os.access(beside := existing_folder(path.parent), os.W_OK):
        raise UserError(f"cannot write {str(path)!r}: no permission for {str(beside)!r}. {DENIED}")
    filled = path.exists() and any(path.iterdir())
    if filled and not overwrite:
        raise UserError(f"{str(path)!r} exists and is not empty; {FREE_PLACE}")
    if filled and path.resolve() in ((here := Path.cwd().resolve()), *here.parents):
        raise UserError(
            f"the output {str(path)!r} is or holds the current folder, which would be removed; give another folder"
        )
    if filled:
        check_replaceable(path)
    return path


def place_of(path: str | Path) -> Path:
    """The absolute path of an output. If it is a symbolic link, e.g. to a larger disk, the folder to which it leads:
    a rename would replace the link.
    """
    path = Path(path).absolute()
    return resolved(path) if path.is_symlink() else path


def check_not_read(path: str | Path, *sources: str | Path | None, renewed: Sequence[str | Path | None] = ()) -> None:
    """Raise ValueError if `path`, the output of a command, is or holds a file or folder that the command reads.

    Otherwise `overwrite` would remove it, e.g. the teacher. None and what is not on the disk, e.g. a data set of the
    Hub, are ignored.

    renewed: folders that the output may replace, e.g. the student that is trained. It must not hold them.
    """
    path = resolved(path)
    for source, may_replace in [*((name, False) for name in sources), *((name, True) for name in renewed)]:
        read = None if source is None else resolved(source)
        if read is not None and read.exists() and (path in read.parents or (path == read and not may_replace)):
            raise UserError(
                f"the output {str(path)!r} would replace {str(source)!r}, which is read; give another folder"
            )


def resolved(path: str | Path) -> Path:
    """The path without symbolic links. Raises ValueError if they lead back to themselves."""
    try:
        return Path(path).resolve()
    except RuntimeError:  # a later Python returns the path, which does not exist then
        raise UserError(f"{str(path)!r} is a symbolic link that leads back to itself; remove it") from None


def existing_folder(path: Path) -> Path:
    """The folder itself, or the nearest one above it that exists."""
    return next(folder for folder in (path, *path.parents) if folder.is_dir())


@contextmanager
def explain_write_errors(path: str | Path, full: str = OTHER_FOLDER, otherwise: str = OTHER_FOLDER) -> Iterator[None]:
    """Raise a ValueError that names `path`, the cause and the remedy if a file cannot be written.

    full: the remedy for a full disk, a quota or a size limit. safetensors and torch raise exceptions of other classes
        in these cases.
    otherwise: the remedy for what is neither that nor a lack of permission.
    """
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not any(part in str(error) for part in _TORCH_WRITE_ERRORS):
            raise
        cause, number = str(error).splitlines()[0], getattr(error, "errno", None)
        if number is None and (found := re.search(r"os error (\d+)", cause)):  # as safetensors writes it
            number = int(found[1])
        if number in _DENIED:
            remedy = DENIED
            if WINDOWS:  # it replaces no open file, e.g. the weights of a model that was loaded from there
                remedy = f"If a model or another program has files there open, close it. {remedy}"
        else:
            remedy = full if number is None or number in _FULL else otherwise
        raise UserError(f"cannot write {str(path)!r}: {cause}. {remedy}") from error


@contextmanager
def atomic_folder(path: str | Path, overwrite: bool = False) -> Iterator[Path]:
    """A temporary folder to fill. On a clean exit it is renamed to `path`; after an exception it is removed.

    Raises ValueError at once if `check_target` refuses `path`, and at the end if another process has written there
    meanwhile. The old folder stays in place until the new one is complete.
    """
    path = check_target(path, overwrite)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=_prefix(path), suffix=".tmp", dir=path.parent))
    try:
        yield temporary
        check_target(path, overwrite)  # another process may have written there in the meantime
        mark_folder(temporary)
        replace_folder(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def replace_file(path: str | Path) -> Iterator[Path]:
    """A temporary path to write a file to. On a clean exit it is flushed to disk and renamed to `path`."""
    path = Path(path).absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{_prefix(path)}file.tmp")
    try:
        yield part
        os.chmod(part, 0o666 & ~_umask())
        flush(part)
        os.replace(part, path)
        flush(path.parent)
    finally:
        part.unlink(missing_ok=True)


def replace_folder(source: Path, path: Path) -> None:
    """Flush `source` to disk and rename it to `path`, replacing a folder that is there.

    All files get the mode that the umask gives, because mkdtemp and safetensors give other users no access.
    """
    mask = _umask()
    for folder, _, files in os.walk(source):
        os.chmod(folder, 0o777 & ~mask)
        for name in files:
            os.chmod(os.path.join(folder, name), 0o666 & ~mask)
        for entry in [folder, *(os.path.join(folder, name) for name in files)]:
            flush(entry)
    # elsewhere there is a moment without a folder
    if path.exists() and exchange(source, path):
        flush(path.parent)
        shutil.rmtree(source, ignore_errors=True)
        return
    old = path.with_name(f"{_prefix(path)}0.old")
    if path.exists():
        os.replace(path, old)
    try:
        os.replace(source, path)
    except OSError:
        if old.exists():
            os.replace(old, path)
        raise
    flush(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def remove_folder(folder: Path, beside: Path) -> None:
    """Remove a folder if it exists. If the process is killed, `remove_leftovers(beside)` later removes the rest."""
    if folder.exists():
        doomed = Path(tempfile.mkdtemp(prefix=_prefix(beside), suffix=".tmp", dir=folder.parent))
        os.replace(folder, doomed / folder.name)  # in place of `doomed` itself Windows would refuse it
        shutil.rmtree(doomed, ignore_errors=True)


def remove_leftovers(path: Path) -> None:
    """Remove temporary folders that processes of this machine, which have ended, left beside `path`.

    An old folder that was moved away is moved back if the new folder was never put in its place.
    """
    if not path.parent.is_dir():
        return
    pattern = re.compile(re.escape(f".{path.name}.{_host()}-") + r"(\d+)-\w+\.(tmp|old)")
    for entry in list(path.parent.iterdir()):
        match = pattern.fullmatch(entry.name)
        if match is None or is_running(int(match[1])):
            continue
        if match[2] == "old" and not path.exists():
            os.replace(entry, path)
        else:
            shutil.rmtree(entry, ignore_errors=True)


def _prefix(path: Path) -> str:
    return f".{path.name}.{_host()}-{os.getpid()}-"


def _host() -> str:
    return socket.gethostname().replace(os.sep, "_")


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
