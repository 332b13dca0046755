"""Redirects everything that this rank prints, from Python, C or a subprocess, to one file per rank.

It is a file and not a pipe, so a rank never waits for the notebook to read, and nothing is lost when the rank dies.
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

# The values that old and new versions of ipykernel set.
_INLINE = ("module://matplotlib_inline.backend_inline", "module://ipykernel.pylab.backend_inline", "inline")
_BACKEND = "module://nbddp.worker.pyplot_backend"


def redirect(fd: int) -> None:
    """Put stdout and stderr (fds 1 and 2) into the file ``fd``, line by line and in order."""
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    sys.stdout = sys.__stdout__ = _text(1)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _text(2)  # type: ignore[misc]
    faulthandler.enable(file=2)


def continue_in(fd: int) -> None:
    """Print into another file from now on: the next call of a rank that stays."""
    flush()
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)


def dump_stacks_on_signal(fd: int) -> None:
    """Write the Python stacks of all threads to ``fd`` on each ``STACKS_SIGNAL``, and when this rank crashes.

    faulthandler writes in the signal handler itself, even inside a C call or a collective. Code that saves and restores
    all handlers, as Lightning's Trainer does, sees and restores only the Python handler that is set here. That one
    answers as soon as the main thread runs Python code again, and installs faulthandler's anew. The notebook kernel
    adds the stacks of a crash to the output, without our frames.
    """

    def dump(*_: object) -> None:
        faulthandler.dump_traceback(fd, all_threads=True)
        faulthandler.unregister(STACKS_SIGNAL)  # else register() would take it for still installed
        install()

    def install() -> None:
        faulthandler.register(STACKS_SIGNAL, file=fd, all_threads=True, chain=False)

    signal.signal(STACKS_SIGNAL, dump)
    install()
    faulthandler.enable(file=fd)
    os.register_at_fork(after_in_child=lambda: faulthandler.enable(file=2))  # the notebook reads fd for ranks only


def replace_inline_backend() -> None:
    """Replace matplotlib's inline backend, which needs a notebook's page, by one that shows the user what to do."""
    if os.environ.get("MPLBACKEND", "") not in _INLINE:
        return  # the user's own choice, or none
    os.environ["MPLBACKEND"] = _BACKEND
    if "matplotlib" in sys.modules:  # imported by the fork server, with the notebook's environment
        sys.modules["matplotlib"].rcParams["backend"] = _BACKEND


def flush() -> None:
    """Write Python's buffers to the file."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (AttributeError, ValueError):  # the user's code replaced or closed it
            continue


class _LossyFile(io.FileIO):
    """Drops output when the disk is full, so that the training continues."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                return len(data)
            raise


def _text(fd: int) -> io.TextIOWrapper:
    raw = _LossyFile(fd, "wb", closefd=False)
    return io.TextIOWrapper(io.BufferedWriter(raw), encoding="utf-8", errors="backslashreplace", line_buffering=True)
