"""Kernel side. What a view of a run is given: one frozen picture of it at a time, its history and its output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from nbddp.kernel.history import History

STATES = ("starting", "running", "finished", "failed", "stopped")


@dataclass(frozen=True)
class RankStatus:
    """One rank at one moment.

    Attributes:
        device: "cuda:0", "cpu".
        state: "starting", "running", "finished", "failed" or "stopped".
        memory_bytes: resident memory of its process, None while unknown.
        gpu_bytes: memory in use on its GPU, by whatever process; None without one.
        gpu_total: of that GPU.
        host: of a run on several, where it is; "" otherwise.
    """

    rank: int
    device: str
    state: str
    memory_bytes: int | None = None
    gpu_bytes: int | None = None
    gpu_total: int | None = None
    host: str = ""


@dataclass(frozen=True)
class Status:
    """A run at one moment.

    Attributes:
        name: the function's.
        state: one of ``STATES``.
        summary: "4 processes · nccl".
        notice: a default the user should hear of, "" if none.
        seconds: since the start, or until the end.
        error: the error on one line, "" if none.
        failed_rank: the rank that the error names, or None.
        blocking: does a cell wait for this run?
        ranks: what each rank is doing.
        restarts, max_restarts: how often all ranks have started again, and how often they may.
        restart_reason: "RankDied: rank 2 of 4 was killed by SIGKILL", of the last restart; "" before the first.
        hang: where the ranks are when nothing has moved for a while: a line that sums up, then
            each rank's stack; "" while there is nothing to tell.
        remark: of a finished run, a line that is no error; "" for none.
    """

    name: str
    state: str
    summary: str
    notice: str
    seconds: float
    error: str = ""
    failed_rank: int | None = None
    blocking: bool = True
    ranks: tuple[RankStatus, ...] = ()
    restarts: int = 0
    max_restarts: int = 0
    restart_reason: str = ""
    hang: str = ""
    remark: str = ""

    @property
    def over(self) -> bool:
        return self.state in ("finished", "failed", "stopped")


class Source(Protocol):
    """A run, as a view may ask for it and steer it. May be used from any thread."""

    @property
    def history(self) -> History: ...

    def status(self) -> Status: ...

    def output(self, rank: int, position: int, limit: int) -> tuple[str, int, bool]:
        """At most ``limit`` bytes of that rank's output from this position on.

        Returns:
            the text, the position after it, and whether it follows on what was before: not when
            there was too much to keep up, or the run is over and only the end is kept.
        """

    def stop(self) -> None:
        """Ask for the run's end, and return at once."""


class View(Protocol):
    """Shows a run. Called on one thread, at most five times a second, and once more when it is over.

    Attributes:
        live: does it change after its first update without a cell that waits?
    """

    live: bool

    def update(self, status: Status, history: History) -> None: ...

    def write(self, text: str) -> None:
        """Rank 0's output, as it comes."""
