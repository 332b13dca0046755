"""Kernel side. Processes of a run that no fork server sees to: found by the mark in their environment."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import psutil

from nbddp.leftovers import ENVIRON

_GONE_S = 1.0
_NAP_S = 0.002


def end(mark: str) -> None:
    """SIGKILL to every process that a rank of that run has started, whatever its session or group.

    Not found are those that were given another environment, and copies of the rank itself (``os.fork``).
    """
    deadline = time.monotonic() + _GONE_S
    while (running := [process for process in psutil.process_iter() if _has(process, mark)]) and (
        time.monotonic() < deadline
    ):
        for process in running:
            with contextlib.suppress(psutil.Error):
                process.kill()  # checks that it is still the same process
        time.sleep(_NAP_S)  # for what they have started meanwhile


def _has(process: psutil.Process, mark: str) -> bool:
    with contextlib.suppress(OSError):  # another user's, or gone
        return f"{ENVIRON}={mark}".encode() in Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
    return False
