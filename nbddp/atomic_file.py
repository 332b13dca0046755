"""Reads and writes files at paths that the user chose: written whole or not at all, and read only if that is safe.

In a folder that others may write to (``/tmp``, a group's folder) anything may be at that path: a named pipe without a
writer, a device without an end, a symbolic link to another file of the user's, a file that another user made.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import tempfile
import time
from pathlib import Path
from typing import BinaryIO

from nbddp.errors import NbddpError
from nbddp.process_state import umask

_PARTIAL = ".partial"
_OLD_S = 60.0
_MAX_LINKS = 40  # as in Linux
_OPEN_FLAGS = os.O_NONBLOCK | os.O_NOCTTY | os.O_NOFOLLOW | os.O_CLOEXEC


def open_own(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a regular file for reading that belongs to this user, to root, or to the owner of its folder.

    A symbolic link is followed if it belongs to one of these.

    Raises:
        NbddpError: it is not such a file. OSError: as ``open``.
    """
    return open(path, "rb", opener=lambda name, flags: open_own_fd(name, flags))


def read_own(path: str | os.PathLike[str], max_nbytes: int) -> bytes:
    """Read such a file. Raises as :func:`open_own`, and NbddpError if the file has more than ``max_nbytes`` bytes."""
    with open_own(path) as file:
        nbytes = os.fstat(file.fileno()).st_size
        if nbytes > max_nbytes:
            raise NbddpError(f"{os.fspath(path)} has {nbytes:,} bytes, which is over the limit of {max_nbytes:,}")
        return file.read(nbytes)  # not max_nbytes: Python allocates the full size that it is asked for


def open_own_fd(path: str, flags: int, mode: int = 0o666) -> int:
    """Like ``os.open`` for such a file; never blocks. For writing, only links of this user and of root are followed."""
    followed = _follow(path, by_folder=not flags & (os.O_WRONLY | os.O_RDWR))
    try:
        fd = os.open(followed, flags | _OPEN_FLAGS, mode)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise NbddpError(f"{path} is a symbolic link that belongs to another user: it is not followed") from None
        # ENXIO: a socket, or a pipe without a reader. EISDIR: a folder, opened for writing.
        if error.errno in (errno.ENXIO, errno.EISDIR):
            raise NbddpError(f"{path} is not a regular file") from None
        raise
    try:
        _check(path, followed, os.fstat(fd))
    except BaseException:
        os.close(fd)
        raise
    return fd


def _check(path: str, followed: str, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise NbddpError(f"{path} is not a regular file")
    if not _is_trusted(followed, status, by_folder=True):
        raise NbddpError(
            f"{path} belongs to another user (uid {status.st_uid}), who may have put anything there. If you trust it, "
            "copy it to a folder of your own"
        )


def _follow(path: str, *, by_folder: bool) -> str:
    """The path after its trusted symbolic links; it may end at an untrusted one. Raises OSError for a loop of links."""
    for _ in range(_MAX_LINKS):
        try:
            status = os.lstat(path)
        except FileNotFoundError:
            return path
        if not stat.S_ISLNK(status.st_mode) or not _is_trusted(path, status, by_folder=by_folder):
            return path
        path = os.path.join(os.path.dirname(path), os.readlink(path))
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)


def _is_trusted(path: str, status: os.stat_result, *, by_folder: bool) -> bool:
    """Whether the file belongs to this user or to root; with ``by_folder`` also the owner of its folder is trusted."""
    if status.st_uid in (os.geteuid(), 0):
        return True
    return by_folder and status.st_uid == os.stat(os.path.dirname(path) or os.curdir).st_uid


class WholeFile:
    """A context manager: opens a new file beside the old one, and replaces the old one on exit without an exception.

    The new file is then on disk (fsync).

    Args:
        path: its folder must exist.
        mode: permissions, before the umask is applied.
    """

    # A class rather than a generator: contextlib's frame would appear in the user's traceback.

    def __init__(self, path: str | os.PathLike[str], mode: int) -> None:
        # Another user's link at this path is replaced: it could lead to another file of this user.
        self._target = Path(os.path.abspath(_follow(os.fspath(path), by_folder=False)))
        self._mode = mode

    def __enter__(self) -> BinaryIO:
        _remove_old_partials(self._target)
        # Not a fixed name: two writers of one target would need a lock, which a forked child would keep and which many
        # cluster file systems lack; and any user who may write to the folder could occupy a fixed name.
        fd, self._partial = tempfile.mkstemp(prefix=f".{self._target.name}.", suffix=_PARTIAL, dir=self._target.parent)
        _lock(fd)
        self._file = open(self._partial, "w+b", opener=lambda *_: fd)  # with the path as its name
        return self._file

    def __exit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        try:
            with self._file:
                if kind is None:
                    self._file.flush()
                    os.fsync(self._file.fileno())
                    os.fchmod(self._file.fileno(), self._mode & ~umask())  # mkstemp made it private
            if kind is None:
                os.replace(self._partial, self._target)
                return
        except BaseException:
            self._remove()
            raise
        self._remove()

    def _remove(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._partial)


def _remove_old_partials(target: Path) -> None:
    """Remove the files of processes that were killed while they wrote: such a file is no longer locked."""
    for path in target.parent.iterdir():
        if path.name.startswith(f".{target.name}.") and path.name.endswith(_PARTIAL):
            with contextlib.suppress(OSError, NbddpError):  # another user's file, or it was removed meanwhile
                _remove_if_abandoned(path)


def _remove_if_abandoned(path: Path) -> None:
    with open_own(path) as file:
        if time.time() - os.fstat(file.fileno()).st_mtime > _OLD_S and _lock(file.fileno()):
            path.unlink()


def _lock(fd: int) -> bool:
    """Lock the file until it is closed or the process ends. Returns False if that is not possible."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # another process has the lock, or the file system has no locks
        return False
    return True
