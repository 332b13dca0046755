"""Kills the processes that ranks leave running: orphans of a rank that has ended become children of the server.

When a process ends, Linux gives its children to the nearest ancestor that is a subreaper. Ranks are subreapers, and so
is the server: a rank keeps detached processes as long as it lives. So a child of the server that the server has not
forked was left by a rank that has ended, whatever the child's session, process group or environment.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Container
from pathlib import Path

from nbddp.worker.dead_man_switch import become_subreaper

_ORPHANS_S = 0.1  # how long to wait for a rank's orphans; slower ones are killed when the next process ends
_ALL_S = 2.0  # how long to wait for all ranks when the notebook kernel has ended
_POLL_S = 0.001
# torch's manager for the sharing strategy "file_system": it removes its files and exits when its last client has ended.
_EXITS_BY_ITSELF = "torch_shm_manag"  # Linux cuts names at 15 characters


def become_subreaper_of_ranks() -> None:
    """Called in the server before its first rank."""
    if _available():
        become_subreaper()


def next_ended(ranks: Container[int]) -> tuple[int, int] | None:
    """The pid and status of a child that has ended; a rank's orphans are killed before its own end is reported."""
    with contextlib.suppress(ChildProcessError):
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            if _available():
                _kill_orphans(ranks, _ORPHANS_S)
            return pid, status
    return None


def kill_all() -> None:
    """Kill all ranks, as their dead man's switches also do, and their orphans, after the end of the notebook kernel."""
    if _available():
        _kill_orphans((), _ALL_S)


def _kill_orphans(ranks: Container[int], within_s: float) -> None:
    began = time.monotonic()
    while orphans := [pid for pid in map(int, _children_file().read_text().split()) if pid not in ranks]:
        for pid in orphans:
            if time.monotonic() > began + _ORPHANS_S / 2 or not _exits_by_itself(pid):
                with contextlib.suppress(OSError):  # a program with more rights than ours
                    os.kill(pid, signal.SIGKILL)  # no other process can get this pid before we wait for it
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        if time.monotonic() > began + within_s:
            return
        time.sleep(_POLL_S)


def _available() -> bool:
    return sys.platform == "linux" and _children_file().exists()


def _children_file() -> Path:
    return Path(f"/proc/self/task/{os.getpid()}/children")


def _exits_by_itself(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().startswith(_EXITS_BY_ITSELF)
    return False
