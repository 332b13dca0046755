"""Worker side. The dead-man's switch: when the notebook kernel is gone, so is this rank and all it started."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import select
import signal
import sys
import threading

from nbddp.worker import reaper


def arm() -> None:
    """Lead a session of our own, and have it killed when the kernel's end of our pipe closes.

    The session keeps the notebook's signals away (Jupyter interrupts the kernel's whole process
    group) and gives DataLoader workers and subprocesses one name to be killed by.

    On Linux the kernel of the machine does the killing (``O_ASYNC`` with ``F_SETSIG``), so it works
    for a rank that holds the GIL for ever or swallows every exception. Elsewhere a thread watches.
    """
    os.setsid()
    if "nbddp.worker.preload" in sys.modules:  # forked from a server, which ends what this rank leaves
        reaper.adopt_orphans()
    parent = multiprocessing.parent_process()
    assert parent is not None, "a worker is always started by multiprocessing"
    sentinel: int = parent.sentinel
    if hasattr(fcntl, "F_SETSIG"):
        fcntl.fcntl(sentinel, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(sentinel, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(sentinel, fcntl.F_SETFL, fcntl.fcntl(sentinel, fcntl.F_GETFL) | os.O_ASYNC)
    else:
        threading.Thread(target=_watch, args=(sentinel,), name="nbddp-switch", daemon=True).start()
    if _closed(sentinel, timeout_ms=0):  # the kernel went before the switch was armed
        _kill_session()


def _watch(sentinel: int) -> None:
    while not _closed(sentinel, timeout_ms=None):
        pass
    _kill_session()


def _closed(sentinel: int, timeout_ms: int | None) -> bool:
    poll = select.poll()
    poll.register(sentinel, select.POLLIN)
    return bool(poll.poll(timeout_ms))


def _kill_session() -> None:
    os.killpg(os.getpgrp(), signal.SIGKILL)
