"""Ends processes of a run that no fork server ends, found by a mark in their environment."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import psutil

from nbddp.worker.leftovers import ENVIRON

_TIMEOUT_S = 1.0
_POLL_S = 0.002


def end(mark: str) -> None:
    """Send SIGKILL to every process that a rank with this mark has started, in any session or process group.

    Processes with another environment and copies of the rank itself (``os.fork``) are not found.
    """
    deadline = time.monotonic() + _TIMEOUT_S
    while (running := [process for process in psutil.process_iter() if _has_mark(process, mark)]) and (
        time.monotonic() < deadline
    ):
        for process in running:
            with contextlib.suppress(psutil.Error):
                process.kill()  # checks that it is still the same process
        time.sleep(_POLL_S)  # then look for processes that they started meanwhile


def _has_mark(process: psutil.Process, mark: str) -> bool:
    with contextlib.suppress(OSError):  # another user's process, or it has ended
        return f"{ENVIRON}={mark}".encode() in Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
    return False
