"""Holds the state of a run, which any thread may read, and the request to stop the run."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from nbddp import wire
from nbddp.kernel.dialog import Dialog
from nbddp.latch import Latch
from nbddp.launch.interface import Crew, Rank
from nbddp.launch.output import RankOutput

STOP_GRACE_S = 5.0  # between KeyboardInterrupt in the ranks and SIGKILL


class RunState:
    """The state of a run. Any thread may read it and request the end; the run's own thread writes it.

    Attributes:
        phase: ``starting``, ``running``, ``finished``, ``failed`` or ``stopped``.
        error: the error of a failed run.
        values: the values of a finished run, by rank.
        outputs: the output of each rank, by rank.
        data_copied: opened when the notebook's data have been copied, and may be changed again.
        done: opened when every process has ended and every fd is closed (that of a large block just after).
        restarts, restart_reason: how often all ranks have been restarted, and why for the last time.
        grown: how many of these restarts were no failure, but let hosts take part that were back.
        hang: where the ranks are after ``stall_after`` seconds without progress; otherwise "".
        held: of a session's call that has finished, the largest names on rank 0, each with a description.
        remark: a line about a finished run that is not an error; otherwise "".
        stop_summary: where the ranks were when the run was stopped, in one line; "" if that is not known.
        stop_grace_s: seconds between KeyboardInterrupt and SIGKILL; None until a stop is requested.
        crew: the ranks of the current attempt; None between attempts.
        dialog: the talk between the debugger of the ranks and the cell.
        stacks_lock: held by a thread that asks the ranks for their stacks, which takes a while.
    """

    def __init__(self) -> None:
        self.phase = "starting"
        self.error: BaseException | None = None
        self.values: list[Any] | None = None
        self.outputs: list[RankOutput] = []
        self.data_copied = Latch()
        self.done = Latch()
        self.dialog = Dialog(self.done.nudge)
        self.restarts = self.grown = 0
        self.restart_reason = ""
        self.hang = ""
        self.held: tuple[tuple[str, str], ...] = ()
        self.remark = ""
        self.stop_summary = ""
        self.stop_grace_s: float | None = None
        self.began = time.monotonic()
        self.crew: Crew | None = None
        self.stacks_lock = threading.RLock()  # not _lock, so that a request to stop need not wait
        self._lock = threading.Lock()  # held while another thread uses the crew, whose fds stay open meanwhile
        self._ended: float | None = None
        self._rank_states: list[str] = []
        self._pids: list[int] = []
        self._over = False
        self._callbacks: list[Callable[[], None]] = []

    @property
    def seconds(self) -> float:
        """Seconds since the start; once the run is over, its duration."""
        return (self._ended or time.monotonic()) - self.began

    def pids(self) -> list[int]:
        """Return the process ids of the ranks that have been started, by rank; also after their end."""
        with self._lock:
            if self.crew is not None:
                self._pids = [worker.pid for worker in self.crew.workers]
            return self._pids

    def rank_states(self) -> list[str]:
        """Return ``starting``, ``running``, ``finished`` or ``ended`` for each rank that has been started."""
        with self._lock:
            if self.crew is not None:
                self._rank_states = [_rank_state(worker) for worker in self.crew.workers]
            return self._rank_states

    def wake(self) -> None:
        """Have the run's own thread look at what has changed."""
        with self._lock:
            if self.crew is not None:
                self.crew.wake()

    def request_stop(self, grace_s: float) -> None:
        """Request the end of the run; a second request can only shorten the grace."""
        with self._lock:
            self.stop_grace_s = grace_s if self.stop_grace_s is None else min(grace_s, self.stop_grace_s)
            if self.crew is not None:
                self.crew.wake()

    def when_done(self, callback: Callable[[], None]) -> None:
        """Call back when the run is over, on the run's thread; at once if it is already over."""
        with self._lock:
            if not self._over:
                self._callbacks.append(callback)
                return
        callback()

    # ------------------------------------------------------------------ for the run's own thread

    @contextlib.contextmanager
    def attached(self, crew: Crew) -> Iterator[None]:
        """Let other threads use this crew; at the end it is closed, when none of them uses it."""
        with self._lock:
            self.crew = crew
        try:
            yield
        finally:
            self.rank_states(), self.pids()  # stores the last states and pids
            with self.stacks_lock, self._lock:
                crew.close()
                self.crew = None

    def restart(self, reason: str) -> None:
        """Reset what belongs to the last attempt: all ranks start again."""
        self.restarts, self.restart_reason = self.restarts + 1, reason
        self.phase, self.hang = "starting", ""
        self._pids, self._rank_states = [], []  # the pids of the dead ranks may soon belong to other processes

    def conclude(self, phase: str, error: BaseException | None = None) -> None:
        """Store how the run has ended; its processes may still be ending."""
        self.error = error
        self.phase = phase

    def end(self) -> None:
        """Wake all waiters: no process of the run is left."""
        self._ended = time.monotonic()
        with self._lock:
            self._over = True
            callbacks, self._callbacks = self._callbacks, []
        self.data_copied.open()
        self.done.open()
        for callback in callbacks:
            callback()


def _rank_state(worker: Rank) -> str:
    if worker.report is not None:
        return "finished" if isinstance(worker.report, wire.Finished) else "ended"
    if not worker.alive:
        return "ended"
    return "running" if worker.called else "starting"
