"""In the fork server. Ends what a rank leaves running: orphans of a rank that has ended are children of the server.

Linux gives a process whose parent ends to the nearest ancestor that is a subreaper. A rank is one, and keeps what its
children detach for as long as it lives; so is the server. What the server has for a child and has not forked itself is
left by a rank that has ended, whatever its session, process group or environment.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h, since 3.4
_GONE_S = 0.1  # of a rank's orphans; those that take longer are looked at again when the next process ends
_ALL_GONE_S = 2.0  # of all ranks, when the kernel is gone
_NAP_S = 0.001
# torch's, of the sharing strategy "file_system": it removes its files and leaves when its last client is gone.
_LEAVES_BY_ITSELF = "torch_shm_manag"  # Linux cuts names at 15 characters

_ranks: set[int] = set()
_fork, _waitpid = os.fork, os.waitpid
_prctl = getattr(ctypes.CDLL(None), "prctl", None) if sys.platform == "linux" else None  # looked up once for all ranks


def adopt_orphans() -> None:
    """From now on, descendants of this process whose parent ends become its children, where the system can do that."""
    if _prctl is not None:
        _prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _available() -> bool:
    return sys.platform == "linux" and _children_file(os.getpid()).exists()


def watch_ranks() -> None:
    """In the server, before its first rank: learn of every rank, and end what it leaves before its end is told.

    multiprocessing's loop (Python 3.10 to 3.14) calls ``os.fork`` for each rank, ``os.waitpid`` at each SIGCHLD, and
    warns of children that it does not know.
    """
    if _available():
        adopt_orphans()
        os.fork, os.waitpid = _fork_rank, _wait_for_rank


def _fork_rank() -> int:
    pid = _fork()
    if pid:
        _ranks.add(pid)
    else:
        os.fork, os.waitpid = _fork, _waitpid
    return pid


def _wait_for_rank(pid: int, options: int) -> tuple[int, int]:
    while True:
        ended, status = _waitpid(pid, options)
        if ended == 0:
            return ended, status
        is_rank = ended in _ranks
        _ranks.discard(ended)
        _end_orphans(_GONE_S)
        if is_rank:
            return ended, status


def end_all() -> None:
    """The kernel is gone: end all ranks, which have the same order from their switch, and what they leave."""
    _ranks.clear()
    if _available():
        _end_orphans(_ALL_GONE_S)


def _end_orphans(within_s: float) -> None:
    began = time.monotonic()
    while orphans := _children() - _ranks:
        for pid in orphans:
            if time.monotonic() > began + _GONE_S / 2 or not _leaves_by_itself(pid):
                with contextlib.suppress(OSError):  # a program with more rights than ours
                    os.kill(pid, signal.SIGKILL)  # nobody else has its number before we wait for it
            with contextlib.suppress(ChildProcessError):
                _waitpid(pid, os.WNOHANG)
        if time.monotonic() > began + within_s:
            return
        time.sleep(_NAP_S)


def _children() -> set[int]:
    return set(map(int, _children_file(os.getpid()).read_text().split()))


def _children_file(pid: int) -> Path:
    return Path(f"/proc/self/task/{pid}/children")


def _leaves_by_itself(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().startswith(_LEAVES_BY_ITSELF)
    return False
