"""A stand-in for Windows, for the modules of this package: `become(folder)`, as the first call of a new process.

What they import is without what Windows lacks, and the functions that Windows has behave as there. In `folder`, nobody
can remove, rename or replace a file that is open or mapped, nor a folder with such files, also not by a library. A
file that is opened as text without an encoding is an error: Windows would not take UTF-8.

Paths still have slashes, and libraries do what they do on this machine.
"""

import builtins
import ctypes
import errno
import fcntl
import os
import signal
import sys
import types
import warnings
from pathlib import Path

OURS = ("hf_memmix", "hf_memmix_kernels", "hf_memmix_cli")
MODULES = {
    *("fcntl", "resource", "posix", "pwd", "grp", "termios", "tty", "pty", "syslog", "curses", "readline"),
    *("triton", "_posixsubprocess", "_posixshmem"),
}
# of Python's documentation: "Availability: Unix"
_IN_OS = """
    chown chroot confstr copy_file_range ctermid eventfd fchdir fchown fdatasync fork forkpty fpathconf fstatvfs
    getegid geteuid getgid getgrouplist getgroups getloadavg getpgid getpgrp getpriority getrandom getresuid getsid
    getuid initgroups killpg lchmod lchown lockf major makedev memfd_create minor mkfifo mknod nice openpty
    pathconf pipe2 posix_fadvise posix_fallocate posix_openpt posix_spawn posix_spawnp pread preadv pwrite pwritev
    readv register_at_fork sched_getaffinity sched_get_priority_max sched_setaffinity sched_yield sendfile setegid
    seteuid setgid setgroups setpgid setpriority setresuid setsid setuid splice statvfs sync sysconf tcgetpgrp
    tcsetpgrp ttyname uname wait wait3 wait4 waitid writev WNOHANG O_CLOEXEC O_DIRECT O_DIRECTORY O_DSYNC O_NOATIME
    O_NOFOLLOW O_NONBLOCK O_SYNC O_TMPFILE RTLD_GLOBAL RTLD_NOW
"""
IN_OS = _IN_OS.split()
_IN_SIGNAL = """
    SIGALRM SIGCHLD SIGCONT SIGHUP SIGKILL SIGPIPE SIGQUIT SIGSTOP SIGTSTP SIGUSR1 SIGUSR2 alarm getitimer pause
    pthread_kill pthread_sigmask setitimer siginterrupt sigpending sigwait
"""
IN_SIGNAL = _IN_SIGNAL.split()
RUNNING = 259  # STILL_ACTIVE


class Altered(types.ModuleType):
    """A module of the standard library with other content; what is not named here is its own."""

    def __init__(self, real, without=(), **instead):
        super().__init__(real.__name__)
        vars(self).update(instead, _real=real, _without=frozenset(without))

    def __getattr__(self, name):
        if name in self._without:
            raise AttributeError(f"module {self.__name__!r} of Windows has no attribute {name!r}")
        return getattr(self._real, name)

    def __setattr__(self, name, value):
        setattr(self._real, name, value)


def refused(path):
    return PermissionError(errno.EACCES, "Access is denied", str(path))


def open_file(path, flags, *more):
    if os.path.isdir(path):
        raise refused(path)
    return os.open(path, flags, *more)


def fsync(handle):
    if fcntl.fcntl(handle, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
        raise OSError(errno.EBADF, "Bad file descriptor")
    os.fsync(handle)


def kill(pid, number):
    raise AssertionError(f"os.kill({pid}, {number}) ends the process, or is Ctrl-C")


def locking(handle, mode, count):
    assert os.lseek(handle, 0, os.SEEK_CUR) >= os.fstat(handle).st_size, "others could not read the locked bytes"
    try:
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB, count, 0, os.SEEK_CUR)
    except OSError:
        raise refused(handle) from None


class Library(ctypes.CDLL):
    def __init__(self, name, *more, **options):
        if name is None:
            raise TypeError("Windows does not give the libraries of the process itself")
        super().__init__(name, *more, **options)


class Kernel32:
    """The functions of kernel32.dll that are called; the handle of a process is its id."""

    @staticmethod
    def _open(access, inherited, pid):
        return pid if Path(f"/proc/{pid}").exists() else None

    def __init__(self):
        self.OpenProcess = types.FunctionType(self._open.__code__, globals())  # takes attributes

    def GetExitCodeProcess(self, handle, status):
        status._obj.value = RUNNING

    def CloseHandle(self, handle):
        assert handle.value

    def K32GetProcessMemoryInfo(self, process, counters, size):
        assert process.value == ctypes.c_void_p(-1).value and size == ctypes.sizeof(counters._obj)
        ctypes.c_size_t.from_buffer(counters._obj, 8).value = 2**20


def is_held(path):
    """Whether a file, or a file below a folder, is open or mapped in this process."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        try:
            found.add(os.readlink(f"/proc/self/fd/{number}"))
        except OSError:
            continue
    with open("/proc/self/maps", encoding="utf-8") as maps:
        found |= {line.split(maxsplit=5)[5].strip() for line in maps if line.count("/") > 0 and "/" in line}
    return any(one == path or one.startswith(path + os.sep) for one in found)


def guarded(function, folder, targets):
    """A function of os that fails on what is held in `folder`."""

    def full(path, directory):
        if directory is not None:
            path = os.path.join(os.readlink(f"/proc/self/fd/{directory}"), os.fspath(path))
        return os.path.abspath(os.fspath(path))

    def call(*paths, dir_fd=None, **more):
        for path in (full(path, dir_fd) for path in paths[:targets]):
            # a folder that is walked is open, too, which is an affair of shutil.rmtree on this machine
            is_folder = os.path.isdir(path) and function is real_rmdir
            if path.startswith(str(folder)) and not is_folder and is_held(path):
                raise refused(path)
        if targets == 2 and os.path.isdir(paths[1]):
            raise refused(paths[1])
        return function(*paths, **more) if dir_fd is None else function(*paths, dir_fd=dir_fd, **more)

    return call


real_rmdir = os.rmdir


def become(folder):
    """Let modules of this package that are imported from now on find Windows. `folder`: an absolute path."""
    for name, targets in {"replace": 2, "rename": 2, "unlink": 1, "remove": 1}.items():
        setattr(os, name, guarded(getattr(os, name), Path(folder), targets))
    windows = {
        "os": Altered(os, IN_OS, name="nt", open=open_file, fsync=fsync, kill=kill),
        "signal": Altered(signal, IN_SIGNAL),
        "sys": Altered(sys, platform="win32"),
        "ctypes": Altered(ctypes, CDLL=Library, WinDLL=lambda *_, **__: Kernel32(), get_last_error=lambda: 0),
        "msvcrt": types.SimpleNamespace(locking=locking, LK_NBLCK=2),
    }
    for name in [name for name in sys.modules if name.split(".")[0] == "triton"]:
        del sys.modules[name]
    sys.modules["triton"] = None
    original = builtins.__import__

    def found(name, globals=None, locals=None, fromlist=(), level=0):
        top = name.split(".")[0]
        if level == 0 and globals and globals.get("__name__", "").split(".")[0] in OURS:
            if top in MODULES:
                raise ModuleNotFoundError(f"No module named {name!r} on Windows", name=name)
            if name in windows:
                return windows[name]
        return original(name, globals, locals, fromlist, level)

    builtins.__import__ = found
    warnings.simplefilter("ignore", EncodingWarning)  # of libraries
    warnings.filterwarnings("error", category=EncodingWarning, module="hf_memmix")
