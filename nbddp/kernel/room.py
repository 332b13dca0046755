"""Kernel side. Room for files: seen to be there before something is begun that leaks or hangs without it."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

_OPENING_S = 0.2

_opening = threading.Lock()


@contextlib.contextmanager
def room_for(fds: int) -> Iterator[None]:
    """Have so many files to open, or raise OSError; one of our threads at a time, so that none takes another's.

    Who opens may wait for something else, too (a store for a DNS server): nobody waits long for that.
    """
    alone = _opening.acquire(timeout=_OPENING_S)
    try:
        with contextlib.ExitStack() as stack:
            for _ in range(fds):
                stack.callback(os.close, os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        yield
    finally:
        if alone:
            _opening.release()
