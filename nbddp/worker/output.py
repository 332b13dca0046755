"""Worker side. Everything this rank prints, from Python, C or a subprocess, goes to one file of its own.

A file and not a pipe: a rank never waits for the notebook to read, and nothing is lost when it dies.
"""

from __future__ import annotations

import errno
import faulthandler
import io
import os
import signal
import sys
from typing import Any

# Not SIGUSR1 or SIGUSR2: job schedulers and users' programs use those.
STACKS_SIGNAL: int = signal.SIGRTMIN + 7 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR2


def redirect(fd: int) -> None:
    """Put stdout and stderr (fds 1 and 2) into the file ``fd``, line by line and in order."""
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    sys.stdout = sys.__stdout__ = _text(1)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _text(2)  # type: ignore[misc]
    faulthandler.enable(file=2)


def answer_stacks(fd: int) -> None:
    """Write the Python stacks of all threads to ``fd`` whenever ``STACKS_SIGNAL`` comes.

    Done by faulthandler in the signal handler itself, so it works inside a C call or a collective.
    """
    faulthandler.register(STACKS_SIGNAL, file=fd, all_threads=True, chain=False)


def flush() -> None:
    """Push what Python still buffers into the file."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (AttributeError, ValueError):  # the user's code replaced or closed it
            continue


class _NeverFull(io.FileIO):
    """A full disk loses lines of output; it does not end a training."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                return len(data)
            raise


def _text(fd: int) -> io.TextIOWrapper:
    raw = _NeverFull(fd, "wb", closefd=False)
    return io.TextIOWrapper(io.BufferedWriter(raw), encoding="utf-8", errors="backslashreplace", line_buffering=True)
