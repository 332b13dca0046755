"""Kernel side. What a view of a run is given: one frozen picture of it at a time, and its history."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from nbddp.kernel.history import History

STATES = ("starting", "running", "finished", "failed", "stopped")


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
    """

    name: str
    state: str
    summary: str
    notice: str
    seconds: float
    error: str = ""
    failed_rank: int | None = None

    @property
    def over(self) -> bool:
        return self.state in ("finished", "failed", "stopped")


class View(Protocol):
    """Shows a run. Called on one thread, at most ten times a second, and once more when it is over."""

    def update(self, status: Status, history: History) -> None: ...

    def write(self, text: str) -> None:
        """Rank 0's output, as it comes."""
