"""Marks and removes the files that a run's processes leave in /dev/shm when they are killed.

    sem.mp-<mark>-...      multiprocessing's semaphores, also those of processes that a rank spawns
    psm_<mark>_...         multiprocessing's SharedMemory without a name from the user
    torch_<pid>_...        a tensor that is sent between processes; the name exists for microseconds
    sem.XXXXXX             the C library's file while it creates a semaphore, also for microseconds
    any name               SharedMemory with a name from the user

The pids and the user's names are in a log in the run's folder.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from collections.abc import Iterable, Iterator
from multiprocessing import process, resource_tracker, shared_memory
from pathlib import Path
from typing import Any

ENVIRON = "NBDDP_RUN"  # the variable that passes the mark to processes that a rank starts
_SHM = "/dev/shm"
_LOG, _MARK = "made", "mark"
_RANDOM_CHARACTERS = 8
_LIBC_TEMPORARY = re.compile(r"sem\.[A-Za-z0-9]{6}")
_TORCH_TENSOR = re.compile(r"torch_(\d+)_.*")


def new_mark() -> str:
    """Return a new attempt's mark."""
    return secrets.token_hex(4)


def write_mark(mark: str, folder: str) -> None:
    """Write an attempt's mark to its folder, if any, for a cleanup after the notebook kernel's end."""
    if folder:
        with contextlib.suppress(OSError):  # a full disk: the leftovers of a dead notebook kernel stay until a reboot
            (Path(folder) / _MARK).write_text(mark)


def mark_of(folder: str) -> str:
    """The mark of the attempt with this folder, "" if it has none."""
    try:
        return (Path(folder) / _MARK).read_text()
    except OSError:
        return ""


# ---------------------------------------------------------------------------- in a rank


def sign(mark: str, folder: str) -> None:
    """Mark everything that this process and its children create from now on.

    Args:
        folder: the run's folder, for its log, or "".
    """
    os.environ[ENVIRON] = mark
    process.current_process()._config["semprefix"] = f"/mp-{mark}"  # type: ignore[attr-defined]
    if hasattr(shared_memory, "_SHM_NAME_PREFIX"):  # Python 3.8 to 3.14
        shared_memory._SHM_NAME_PREFIX = f"/psm_{mark}_"
        shared_memory._SHM_SAFE_NAME_LENGTH = len(shared_memory._SHM_NAME_PREFIX) + _RANDOM_CHARACTERS  # type: ignore[attr-defined]
    if folder:
        _keep_log(os.path.join(folder, _LOG))


def _keep_log(path: str) -> None:
    def log(line: str) -> None:
        with contextlib.suppress(OSError):  # the run is over, or the disk is full
            fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.write(fd, f"{line}\n".encode())  # in one write, so that processes do not mix their lines
            finally:
                os.close(fd)

    def log_pid() -> None:
        log(f"pid {os.getpid()}")

    log_pid()
    os.register_at_fork(after_in_child=log_pid)
    _log_named_segments(log)


def _log_named_segments(log: Any) -> None:
    posix: Any = getattr(shared_memory, "_posixshmem", None)  # Python 3.8 to 3.14
    original = getattr(posix, "shm_open", None)
    if original is None:
        return

    def shm_open(path: str, flags: int, mode: int = 0o777) -> int:
        fd: int = original(path, flags, mode=mode)
        if flags & os.O_CREAT and not path.startswith(shared_memory._SHM_NAME_PREFIX):  # type: ignore[attr-defined]
            log(f"shm {os.fstat(fd).st_ino} {path.removeprefix('/')}")
        return fd

    posix.shm_open = shm_open


# ---------------------------------------------------------------------------- after the rank's end


def remove(mark: str, folder: str, pids: Iterable[int], *, segments: bool) -> None:
    """Remove what a run's processes left when they ended.

    Args:
        folder: the run's folder, or "".
        pids: the pids of its ranks.
        segments: whether to remove SharedMemory, too; a finished run may have returned its names to the notebook.
    """
    if not mark or not os.path.isdir(_SHM):
        return
    log = _Log(folder, pids)
    for name in os.listdir(_SHM):
        with contextlib.suppress(OSError):  # it no longer exists, or belongs to another user
            if name.startswith(f"sem.mp-{mark}-"):
                _remove(name, name.removeprefix("sem."), "semaphore")
            elif segments and (name.startswith(f"psm_{mark}_") or log.has_segment(name)):
                _remove(name, name, "shared_memory")
            elif log.has_tensor(name) or _is_unfinished_semaphore(name):
                os.unlink(os.path.join(_SHM, name))


class _Log:
    """The run's processes, and the segments that they created with names from the user."""

    def __init__(self, folder: str, pids: Iterable[int]) -> None:
        lines: list[list[str]] = []
        if folder:
            with contextlib.suppress(OSError):  # no process has logged anything
                lines = [line.split(" ", 2) for line in (Path(folder) / _LOG).read_text().splitlines()]
        self._pids = {*pids, *(int(line[1]) for line in lines if line[0] == "pid")}
        self._segments = {(line[2], int(line[1])) for line in lines if line[0] == "shm"}

    def has_segment(self, name: str) -> bool:
        return bool(self._segments) and (name, os.stat(os.path.join(_SHM, name)).st_ino) in self._segments

    def has_tensor(self, name: str) -> bool:
        found = _TORCH_TENSOR.fullmatch(name)
        if found is None or int(found[1]) not in self._pids:
            return False
        with contextlib.suppress(OSError):
            # A running process has got the pid again, and uses its file. A zombie is a rank that was just killed.
            return Path(f"/proc/{found[1]}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
        return True


def _remove(name: str, tracked_name: str, kind: str) -> None:
    os.unlink(os.path.join(_SHM, name))
    if getattr(resource_tracker._resource_tracker, "_fd", None) is not None:
        # The resource tracker, which the notebook kernel and the ranks share, would warn of the name at its end. It
        # can only unregister a known name, but a rank may have been killed before it registered this one.
        resource_tracker.register(f"/{tracked_name}", kind)
        resource_tracker.unregister(f"/{tracked_name}", kind)


def _is_unfinished_semaphore(name: str) -> bool:
    """Was it left by a process that was killed while it created a semaphore? Until then its creator has it open."""
    if not _LIBC_TEMPORARY.fullmatch(name):
        return False
    path = os.path.join(_SHM, name)
    return os.stat(path).st_uid == os.getuid() and path not in _open_files()


def _open_files() -> Iterator[str]:
    """The files that all processes have open, as far as we may look."""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            for fd in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    yield os.readlink(f"/proc/{pid}/fd/{fd}")
