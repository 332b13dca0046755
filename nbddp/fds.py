"""File descriptors: checks that enough are free, and enlarges pipes."""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
from collections.abc import Iterator

_LOCK_S = 0.2
_PIPE_BYTES = 1 << 20
_F_SETPIPE_SZ = 1031

_reserving = threading.Lock()


@contextlib.contextmanager
def reserve(fds: int) -> Iterator[None]:
    """Check that this process may open ``fds`` more files, before starting something that leaks or hangs without them.

    The lock keeps other threads of nbddp from taking them meanwhile. The wait for the lock is at most 0.2 s, since the
    thread that holds it may be blocked on DNS.

    Raises:
        OSError: the limit is reached.
    """
    alone = _reserving.acquire(timeout=_LOCK_S)
    try:
        with contextlib.ExitStack() as stack:
            for _ in range(fds):
                stack.callback(os.close, os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        yield
    finally:
        if alone:
            _reserving.release()


def widen(fd: int) -> None:
    """Enlarge a pipe to 1 MiB; if the user's limit on pipe memory is reached, the pipe keeps its size."""
    with contextlib.suppress(OSError):
        fcntl.fcntl(fd, _F_SETPIPE_SZ, _PIPE_BYTES)
