"""Both sides. Files that are whole or not there: what is written takes the old one's place when it is complete."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
import time
from pathlib import Path
from typing import BinaryIO

_PARTIAL = ".partial"
_OLD_S = 60.0


class WholeFile:
    """Within it, a new file beside the old one; left without an exception it is on disk, in the old one's place.

    Args:
        path: the folder must exist.
        mode: permissions, which the umask cuts.
    """

    # A class, and no generator: contextlib's frame would stand in the user's traceback.

    def __init__(self, path: str | os.PathLike[str], mode: int) -> None:
        self._target = Path(os.path.realpath(path))
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
                    os.fchmod(self._file.fileno(), self._mode & ~_umask())  # mkstemp is for secrets
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
            with contextlib.suppress(OSError):  # somebody else's, or it has been removed meanwhile
                _remove_if_nobodys(path)


def _remove_if_nobodys(path: Path) -> None:
    with path.open("rb") as file:
        if time.time() - os.fstat(file.fileno()).st_mtime > _OLD_S and _lock(file.fileno()):
            path.unlink()


def _lock(fd: int) -> bool:
    """Until the file is closed, or its process ends."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # somebody has it, or the file system has no locks
        return False
    return True


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
