"""Both sides. Files under a name of the user's: written whole or not at all, and read only where that is safe.

In a folder that others may write to (``/tmp``, a group's) anything may lie under that name: a named pipe that nobody
writes to, a device without an end, a symbolic link to some other file of the user's, a file that somebody else made.
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
_MOST_LINKS = 40  # as Linux
_AT_ONCE = os.O_NONBLOCK | os.O_NOCTTY | os.O_NOFOLLOW | os.O_CLOEXEC


def open_own(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a regular file for reading, which belongs to this user, to root, or to its folder's owner.

    A symbolic link is followed if it belongs to one of these.

    Raises:
        NbddpError: something else is there. OSError: as ``open``.
    """
    return open(path, "rb", opener=lambda name, flags: open_own_fd(name, flags))


def read_own(path: str | os.PathLike[str], most_nbytes: int) -> bytes:
    """All of such a file. Raises as :func:`open_own`, and NbddpError if it has more bytes than that."""
    with open_own(path) as file:
        nbytes = os.fstat(file.fileno()).st_size
        if nbytes > most_nbytes:
            raise NbddpError(f"{os.fspath(path)} has {nbytes:,} bytes, and at most {most_nbytes:,} are read")
        return file.read(nbytes)  # not most_nbytes: Python allocates as much as it is asked for


def open_own_fd(path: str, flags: int, mode: int = 0o666) -> int:
    """As ``os.open``, of such a file; never waits. For writing, only this user's and root's links are followed."""
    followed = _follow(path, by_folder=not flags & (os.O_WRONLY | os.O_RDWR))
    try:
        fd = os.open(followed, flags | _AT_ONCE, mode)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise NbddpError(f"{path} is a symbolic link of another user's: it is not followed") from None
        if error.errno in (errno.ENXIO, errno.EISDIR):  # a socket, or a pipe that nobody reads; a folder, for writing
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
    """Where the name's symbolic links lead, up to the first that is somebody else's. Raises OSError if to no end."""
    for _ in range(_MOST_LINKS):
        try:
            status = os.lstat(path)
        except FileNotFoundError:
            return path
        if not stat.S_ISLNK(status.st_mode) or not _is_trusted(path, status, by_folder=by_folder):
            return path
        path = os.path.join(os.path.dirname(path), os.readlink(path))
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)


def _is_trusted(path: str, status: os.stat_result, *, by_folder: bool) -> bool:
    """Does it belong to this user, to root, or to who may put there what he likes, and was asked for by his folder?"""
    if status.st_uid in (os.geteuid(), 0):
        return True
    return by_folder and status.st_uid == os.stat(os.path.dirname(path) or os.curdir).st_uid


class WholeFile:
    """Within it, a new file beside the old one; left without an exception it is on disk, in the old one's place.

    Args:
        path: the folder must exist.
        mode: permissions, which the umask cuts.
    """

    # A class, and no generator: contextlib's frame would stand in the user's traceback.

    def __init__(self, path: str | os.PathLike[str], mode: int) -> None:
        # Somebody else's link there is replaced, not followed to a file of ours.
        self._target = Path(os.path.abspath(_follow(os.fspath(path), by_folder=False)))
        self._mode = mode

    def __enter__(self) -> BinaryIO:
        _remove_old_partials(self._target)
        fd, self._partial = tempfile.mkstemp(prefix=f".{self._target.name}.", suffix=_PARTIAL, dir=self._target.parent)
        _lock(fd)
        self._file = open(self._partial, "w+b", opener=lambda *_: fd)  # its name is where it lies
        return self._file

    def __exit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        try:
            with self._file:
                if kind is None:
                    self._file.flush()
                    os.fsync(self._file.fileno())
                    os.fchmod(self._file.fileno(), self._mode & ~umask())  # mkstemp is for secrets
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
    """What processes left that were killed while they wrote: nobody holds its lock any more."""
    for path in target.parent.iterdir():
        if path.name.startswith(f".{target.name}.") and path.name.endswith(_PARTIAL):
            with contextlib.suppress(OSError, NbddpError):  # somebody else's, or it has been removed meanwhile
                _remove_if_nobodys(path)


def _remove_if_nobodys(path: Path) -> None:
    with open_own(path) as file:
        if time.time() - os.fstat(file.fileno()).st_mtime > _OLD_S and _lock(file.fileno()):
            path.unlink()


def _lock(fd: int) -> bool:
    """Until the file is closed, or its process ends."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # somebody has it, or the file system has no locks
        return False
    return True
