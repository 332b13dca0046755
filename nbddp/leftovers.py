"""Both sides. What the processes of a run leave in /dev/shm when they are killed: known as theirs, and removed.

    sem.mp-<mark>-...      semaphores of multiprocessing, also in processes that a rank spawns
    psm_<mark>_...         multiprocessing's SharedMemory without a name of the user's
    torch_<pid>_...        a tensor on its way between processes; the name is gone within microseconds
    sem.XXXXXX             the C library's, while it makes a semaphore: also within microseconds
    any name               SharedMemory with a name of the user's

The pids and the user's names are in a book in the run's folder.
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

ENVIRON = "NBDDP_RUN"  # the mark, for all that a rank starts
_SHM = "/dev/shm"
_BOOK, _MARK = "made", "mark"
_RANDOM_CHARACTERS = 8
_C_LIBRARYS = re.compile(r"sem\.[A-Za-z0-9]{6}")
_TORCHS = re.compile(r"torch_(\d+)_.*")


def new_mark(folder: str) -> str:
    """For an attempt, which remembers it in its folder if it has one: who cleans up after the kernel finds it there."""
    mark = secrets.token_hex(4)
    if folder:
        with contextlib.suppress(OSError):  # the disk is full: what is left then stays until the machine's next start
            (Path(folder) / _MARK).write_text(mark)
    return mark


def mark_of(folder: str) -> str:
    """Of the attempt that has this folder, "" if it has none."""
    try:
        return (Path(folder) / _MARK).read_text()
    except OSError:
        return ""


# ---------------------------------------------------------------------------- in a rank


def sign(mark: str, folder: str) -> None:
    """Have what this process and its children make from now on be known by that mark.

    Args:
        folder: the run's, for its book; "": there is none.
    """
    os.environ[ENVIRON] = mark
    process.current_process()._config["semprefix"] = f"/mp-{mark}"  # type: ignore[attr-defined]
    if hasattr(shared_memory, "_SHM_NAME_PREFIX"):  # Python 3.8 to 3.14
        shared_memory._SHM_NAME_PREFIX = f"/psm_{mark}_"
        shared_memory._SHM_SAFE_NAME_LENGTH = len(shared_memory._SHM_NAME_PREFIX) + _RANDOM_CHARACTERS  # type: ignore[attr-defined]
    if folder:
        _keep_book(os.path.join(folder, _BOOK))


def _keep_book(book: str) -> None:
    def note(line: str) -> None:
        with contextlib.suppress(OSError):  # the run is over, or the disk is full
            fd = os.open(book, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.write(fd, f"{line}\n".encode())  # one write: no other process's line comes between
            finally:
                os.close(fd)

    def note_pid() -> None:
        note(f"pid {os.getpid()}")

    note_pid()
    os.register_at_fork(after_in_child=note_pid)
    _note_named_segments(note)


def _note_named_segments(note: Any) -> None:
    posix: Any = getattr(shared_memory, "_posixshmem", None)  # Python 3.8 to 3.14
    original = getattr(posix, "shm_open", None)
    if original is None:
        return

    def shm_open(path: str, flags: int, mode: int = 0o777) -> int:
        fd: int = original(path, flags, mode=mode)
        if flags & os.O_CREAT and not path.startswith(shared_memory._SHM_NAME_PREFIX):  # type: ignore[attr-defined]
            note(f"shm {os.fstat(fd).st_ino} {path.removeprefix('/')}")
        return fd

    posix.shm_open = shm_open


# ---------------------------------------------------------------------------- after its end


def remove(mark: str, folder: str, pids: Iterable[int], *, segments: bool) -> None:
    """Remove what processes of a run have left that are gone.

    Args:
        folder: the run's, or "".
        pids: of its ranks.
        segments: SharedMemory, too? Of a run that has finished, the notebook may have been told the names.
    """
    if not mark or not os.path.isdir(_SHM):
        return
    book = _Book(folder, pids)
    for name in os.listdir(_SHM):
        with contextlib.suppress(OSError):  # it has been removed meanwhile, or is another user's
            if name.startswith(f"sem.mp-{mark}-"):
                _remove(name, name.removeprefix("sem."), "semaphore")
            elif segments and (name.startswith(f"psm_{mark}_") or book.has_segment(name)):
                _remove(name, name, "shared_memory")
            elif book.has_tensor(name) or _is_nobodys_semaphore(name):
                os.unlink(os.path.join(_SHM, name))


class _Book:
    """Which processes may have made something, and what they did under names of the user's."""

    def __init__(self, folder: str, pids: Iterable[int]) -> None:
        lines = [line.split(" ", 2) for line in _lines_of(folder)]
        self._pids = {*pids, *(int(line[1]) for line in lines if line[0] == "pid")}
        self._segments = {(line[2], int(line[1])) for line in lines if line[0] == "shm"}

    def has_segment(self, name: str) -> bool:
        return bool(self._segments) and (name, os.stat(os.path.join(_SHM, name)).st_ino) in self._segments

    def has_tensor(self, name: str) -> bool:
        found = _TORCHS.fullmatch(name)
        # Not of a process that has the pid now.
        return found is not None and int(found[1]) in self._pids and not _runs(found[1])


def _runs(pid: str) -> bool:
    """A zombie does not: a rank that was just killed may not have been waited for yet."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def _lines_of(folder: str) -> list[str]:
    try:
        return (Path(folder) / _BOOK).read_text().splitlines() if folder else []
    except OSError:
        return []


def _remove(name: str, known_as: str, kind: str) -> None:
    os.unlink(os.path.join(_SHM, name))
    if getattr(resource_tracker._resource_tracker, "_fd", None) is not None:
        # The kernel's tracker, which the ranks share, would complain at the kernel's end. It must know a name to forget
        # it, and may not: the maker may have been killed just before it told.
        resource_tracker.register(f"/{known_as}", kind)
        resource_tracker.unregister(f"/{known_as}", kind)


def _is_nobodys_semaphore(name: str) -> bool:
    """Is it what a process has left that was killed while it made one? Its maker has it open until it is made."""
    if not _C_LIBRARYS.fullmatch(name):
        return False
    path = os.path.join(_SHM, name)
    return os.stat(path).st_uid == os.getuid() and path not in _open_files()


def _open_files() -> Iterator[str]:
    """Of all processes that we may look into."""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            for fd in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    yield os.readlink(f"/proc/{pid}/fd/{fd}")
