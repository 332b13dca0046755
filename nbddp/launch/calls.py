"""Begins one more call on a rank of a session: it needs new ends, since each call has its own metrics and output."""

from __future__ import annotations

import contextlib
import os
import threading
from typing import NamedTuple

from nbddp import fds, payload, wire
from nbddp.launch.output import RankOutput, open_output
from nbddp.launch.rank import LocalRank


class Ends(NamedTuple):
    """File descriptors of one rank in one call: both ends of the pipe for its metrics, and the block for its result."""

    metrics_r: int
    metrics_w: int
    result: int


def open_ends() -> Ends:
    """Open the ends of a call. Raises OSError."""
    with contextlib.ExitStack() as unless_opened:
        metrics_r, metrics_w = os.pipe()
        unless_opened.callback(_close, metrics_r, metrics_w)
        fds.widen(metrics_w)
        os.set_blocking(metrics_r, False)
        ends = Ends(metrics_r, metrics_w, payload.open_block("result"))
        unless_opened.pop_all()
    return ends


def begin_call(worker: LocalRank, call: wire.NextCall, output: RankOutput, block: int, ends: Ends) -> None:
    """Begin a call on a rank that stays and has reported.

    Args:
        block: file descriptor of the call's payload.
        ends: which this call closes.
    """
    fds_here = {"metrics": ends.metrics_r, "result": ends.result}
    try:
        worker.begin(call, output, fds_here, (ends.metrics_w, output.fileno(), block, ends.result))
    finally:
        os.close(ends.metrics_w)


class SpareEnds:
    """Ends and output files for the next call, opened while this one goes on: they take 0.1 to 0.3 ms for each rank."""

    def __init__(self) -> None:
        self._ends: list[Ends] = []
        self._outputs: list[int] = []
        self._closed = False
        self._lock = threading.Lock()  # between the thread that fills and the one that closes

    def take(self) -> Ends:
        """Return the ends of a call, which the caller closes. Raises OSError."""
        try:
            return self._ends.pop()
        except IndexError:
            return open_ends()

    def take_output(self) -> int:
        """Return a file for a rank's output, which the caller closes. Raises OSError."""
        try:
            return self._outputs.pop()
        except IndexError:
            return open_output()

    def fill(self, ranks: int) -> None:
        """Open what a call on so many ranks needs; where the system refuses a file, the call will say so."""
        with self._lock, contextlib.suppress(OSError):
            while not self._closed and len(self._outputs) < ranks:
                self._outputs.append(open_output())
            while not self._closed and len(self._ends) < ranks:
                self._ends.append(open_ends())

    def close(self) -> None:
        """Close everything; nothing is opened any more."""
        with self._lock:
            self._closed = True
            self.disown()

    def disown(self) -> None:
        """Close everything, in a process forked from the kernel, where no thread can hold the lock."""
        _close(*self._outputs, *(fd for ends in self._ends for fd in ends))
        self._outputs.clear()
        self._ends.clear()


def _close(*closed: int) -> None:
    for fd in closed:
        os.close(fd)
