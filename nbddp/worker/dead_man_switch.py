"""The dead man's switch: kills this rank and all processes it started when the notebook kernel ends."""

from __future__ import annotations

import ctypes
import fcntl
import multiprocessing
import os
import select
import signal
import sys
import threading

from nbddp.worker import inherited

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h, since 3.4
_prctl = getattr(ctypes.CDLL(None), "prctl", None) if sys.platform == "linux" else None  # looked up once for all ranks


def arm() -> None:
    """Start a session, and have it killed when the notebook kernel's end of our pipe closes.

    The session keeps the notebook's signals away (Jupyter interrupts the notebook kernel's whole process
    group), and lets DataLoader workers and subprocesses be killed together.

    On Linux the operating system kills the session (``O_ASYNC`` with ``F_SETSIG``), so it works for a rank
    that holds the GIL forever or swallows every exception. Elsewhere a thread watches the pipe.
    """
    os.setsid()
    if inherited.forked:  # from a server, which ends this rank's orphans
        become_subreaper()
    parent = multiprocessing.parent_process()
    assert parent is not None, "a worker is always started by multiprocessing"
    sentinel: int = parent.sentinel
    if not kill_on_hangup(sentinel, -os.getpgrp()):
        threading.Thread(target=_watch, args=(sentinel,), name="nbddp-switch", daemon=True).start()
    if has_hung_up(sentinel):  # the notebook kernel ended before the switch was armed
        _kill_session()


def kill_on_hangup(fd: int, owner: int) -> bool:
    """Have Linux send SIGKILL to a process, or to a process group (``-pgid``), when the pipe's other end closes.

    A pipe that has been closed before is not noticed: check :func:`has_hung_up` afterwards.

    Returns:
        whether this system can do that.
    """
    if not hasattr(fcntl, "F_SETSIG"):
        return False
    fcntl.fcntl(fd, fcntl.F_SETOWN, owner)
    fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_ASYNC)
    return True


def disarm(fd: int) -> None:
    """Undo :func:`kill_on_hangup`."""
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~getattr(os, "O_ASYNC", 0))


def has_hung_up(fd: int, timeout_ms: int | None = 0) -> bool:
    """Whether the pipe's other end is closed, or is closed within the timeout (None: wait for it)."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(timeout_ms))


def become_subreaper() -> None:
    """Become the parent of all descendants whose own parent ends (Linux only)."""
    if _prctl is not None:
        _prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _watch(sentinel: int) -> None:
    while not has_hung_up(sentinel, timeout_ms=None):
        pass
    _kill_session()


def _kill_session() -> None:
    os.killpg(os.getpgrp(), signal.SIGKILL)
