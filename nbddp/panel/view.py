"""The interface between a run and its views: a frozen status, the history and the output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from nbddp.history.history import History

STATES = ("starting", "running", "finished", "failed", "stopped")


@dataclass(frozen=True)
class RankStatus:
    """One rank at one moment.

    Attributes:
        device: "cuda:0", "cpu".
        state: one of ``STATES``.
        memory_bytes: resident memory of the rank's process, None if not known.
        gpu_bytes: memory in use on the rank's GPU, by any process; None without a GPU.
        gpu_total: memory of that GPU in bytes; None without a GPU.
        host: the rank's host if the run is on several; "" otherwise.
        debugger: where the rank has stopped in the debugger, "train, line 14"; "" if it has not.
    """

    rank: int
    device: str
    state: str
    memory_bytes: int | None = None
    gpu_bytes: int | None = None
    gpu_total: int | None = None
    host: str = ""
    debugger: str = ""


@dataclass(frozen=True)
class Status:
    """A run at one moment.

    Attributes:
        name: the run's name, by default the function's.
        state: one of ``STATES``.
        summary: "4 processes · nccl".
        notice: a default that the user should know about, "" if none.
        seconds: from the start until now, or until the end.
        error: the error on one line, "" if none.
        failed_rank: the rank that the error names, or None.
        failing_names: the names on the line that failed there, each with a description.
        held: of a session's call that has finished, the largest names on rank 0, each with a description.
        blocking: a cell waits for this run.
        ranks: the state of each rank.
        restarts, max_restarts: how often all ranks have started again, and how often they may.
        restart_reason: of the last restart, "RankDied: rank 2 of 4 was killed by SIGKILL"; "" before the first.
        hang: where the ranks are when none has made progress for a while: a summary in the first line, then each
            rank's stack; "" if the run does not hang.
        remark: a line about a finished run that is not an error; "" if none.
        waits_for: what the run waits for, "importing torch, 1.1 s"; "" for nothing. The summary has it, too.
    """

    name: str
    state: str
    summary: str
    notice: str
    seconds: float
    error: str = ""
    failed_rank: int | None = None
    failing_names: tuple[tuple[str, str], ...] = ()
    held: tuple[tuple[str, str], ...] = ()
    blocking: bool = True
    ranks: tuple[RankStatus, ...] = ()
    restarts: int = 0
    max_restarts: int = 0
    restart_reason: str = ""
    hang: str = ""
    remark: str = ""
    waits_for: str = ""

    @property
    def over(self) -> bool:
        return self.state in ("finished", "failed", "stopped")


@dataclass(frozen=True)
class Earlier:
    """An earlier run of the same function or cell, which is over.

    Attributes:
        name: the run's name.
        began: unix time.
    """

    name: str
    began: float
    history: History


class Viewable(Protocol):
    """A run, as far as a view may read and control it. May be used from any thread."""

    @property
    def history(self) -> History: ...

    @property
    def earlier(self) -> Earlier | None:
        """The run to compare this one with, if there is one."""

    def status(self) -> Status: ...

    def output(self, rank: int, position: int, limit: int) -> tuple[str, int, bool]:
        """At most ``limit`` bytes of that rank's output from this position on.

        Returns:
            the text, the position after it, and whether the text continues the text before ``position``. It does not
            if output was skipped because there was too much, or because the run is over and only the end is kept.
        """

    def stop(self) -> None:
        """Request the run's end, and return at once."""


class View(Protocol):
    """Shows a run. Called on one thread, at most five times a second, and once more when the run is over.

    Attributes:
        live: the view can be updated after its cell has ended.
    """

    live: bool

    def update(self, status: Status) -> None:
        """Show the run as it is now; ``status`` is its :meth:`Viewable.status`."""

    def write(self, text: str) -> None:
        """Show a piece of rank 0's output."""
