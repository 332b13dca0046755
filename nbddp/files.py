"""Files at paths that the user chose: written whole or not at all."""

import contextlib
import os
import secrets
from collections.abc import Iterator
from typing import BinaryIO

from nbddp.errors import NbddpError


@contextlib.contextmanager
def new_file(path: str | os.PathLike[str], mode: int = 0o666) -> Iterator[BinaryIO]:
    """Open a new file in the same folder, and replace the old one with it at the end.

    It gets a name only then, where the disk allows that, so that nothing is left of a writer that was killed. What is
    at the path isn't opened: it could be a pipe without a reader, or another user's link to a file of yours.

    Args:
        mode: of the file; the process's umask takes its bits away.

    Raises:
        NbddpError: the file can't be written.
    """
    path = os.path.abspath(path)
    folder = os.path.dirname(path)
    partial = os.path.join(folder, f".nbddp-{secrets.token_hex(8)}")
    try:
        if os.path.exists(path) and not os.path.isfile(path):  # root may replace even /dev/null
            raise ValueError("it exists and isn't a regular file")
        try:
            fd = os.open(folder, os.O_TMPFILE | os.O_WRONLY, mode)
        except OSError:  # such as NFS
            fd = os.open(partial, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode)
        with open(fd, "wb") as file:
            yield file
            file.flush()
            if not os.path.exists(partial):  # with src_dir_fd, Python asks for the file that the link leads to
                os.link(f"/proc/self/fd/{fd}", partial, src_dir_fd=fd)
        os.replace(partial, path)
    except (OSError, ValueError) as error:
        raise NbddpError(f"can't write {path!r}: {getattr(error, 'strerror', None) or error}") from error
    finally:
        with contextlib.suppress(OSError, ValueError):
            os.unlink(partial)
