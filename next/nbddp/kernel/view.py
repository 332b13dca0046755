"""What draws a run: a view gets its status and its history. This one writes lines of text."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

from nbddp.history.history import History
from nbddp.text import write

_LINE_EVERY_S = 2.0
_MAX_METRICS = 8


@dataclass(frozen=True)
class Status:
    """How a run is."""

    name: str
    state: str
    seconds: float
    restarts: int = 0
    error: str = ""
    hang: str = ""

    @property
    def over(self) -> bool:
        return self.state not in ("starting", "running")


class View(Protocol):
    """Draws a run."""

    def update(self, status: Status, history: History) -> None: ...


class TextView:
    """The newest metrics, in a line every two seconds."""

    def __init__(self) -> None:
        self._due = time.monotonic() + _LINE_EVERY_S
        self._shown = self._hang = ""

    def update(self, status: Status, history: History) -> None:
        self.tell(status.hang)
        if not status.over and time.monotonic() < self._due:
            return
        self._due = time.monotonic() + _LINE_EVERY_S
        latest = [f"{name} {value:.4g}" for name, value in list(history.latest().items())[:_MAX_METRICS]]
        step = max((rank.step for rank in history.ranks), default=-1)
        line = "  ".join([f"step {step}", *latest]) if latest else ""
        if line and line != self._shown:
            self._shown = line
            write(f"{status.name}: {line}\n")

    def tell(self, hang: str) -> None:
        """Write what is new about a stall."""
        if hang != self._hang:
            self._hang = hang
            write(f"{hang}\n" if hang else "")


class NoView:
    """Shows nothing."""

    def update(self, status: Status, history: History) -> None: ...
