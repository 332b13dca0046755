"""Finds out where the ranks of an attempt are, and whether they still make progress."""

from __future__ import annotations

import time
from collections.abc import Callable

from nbddp.history.history import History
from nbddp.kernel import stacks
from nbddp.kernel.failure import Failures
from nbddp.kernel.stacks import Location
from nbddp.kernel.state import RunState
from nbddp.launch.interface import Crew

_STACKS_TIMEOUT_S = 1.0
_STALLED_S = 2.0  # without progress
_RECHECK_S = 0.2


class StallDetector:
    """Notices a lack of progress, and again each time it has lasted twice as long."""

    def __init__(self, after_s: float | None) -> None:
        self.reported = False
        self._after_s = after_s
        self._progress: object = None
        self._since = time.monotonic()
        self._due = 0.0

    @property
    def seconds(self) -> float:
        """Seconds since the last progress."""
        return time.monotonic() - self._since

    def restart(self) -> None:
        """Begin again: what stands still is waiting for the user."""
        self._progress = None

    def is_due(self, progress: object) -> bool:
        """Return whether it is time for a report; ``progress`` is a value that changes with any progress."""
        now = time.monotonic()
        if progress != self._progress:
            self._progress, self._since, self._due = progress, now, now + (self._after_s or float("inf"))
            self.reported = False
        if now < self._due:
            return False
        self._due = now + (now - self._since)
        self.reported = True
        return True


class Locator:
    """Finds out where the ranks of one attempt are."""

    def __init__(self, crew: Crew, failures: Failures, history: History, state: RunState, stall: StallDetector) -> None:
        self._crew = crew
        self._failures = failures
        self._history = history
        self._state = state
        self._stall = stall

    def locate(self, timeout_s: float, feed: Callable[[], object] = lambda: None) -> list[Location]:
        """Return where each rank is; ``feed`` updates the history, which only the run's own thread may do."""
        with self._state.stacks_lock:
            dumps = self._crew.stacks(timeout_s)
        feed()
        steps = [rank.step for rank in self._history.ranks]
        return [self._failures.location_of(w, dumps.get(w.rank, ""), steps[w.rank]) for w in self._crew.workers]

    def report(self, feed: Callable[[], object] = lambda: None) -> str:
        """Return the line that sums up and each stack; a likely reason for a wait only if no rank moves."""
        found = self.locate(_STACKS_TIMEOUT_S, feed)
        if self._stall.seconds < _STALLED_S:
            return stacks.report(found)
        time.sleep(_RECHECK_S)
        return stacks.report(found, stalled=self.locate(_STACKS_TIMEOUT_S, feed) == found)

    def check_for_a_stall(self, feed: Callable[[], object]) -> None:
        """Report where the ranks are if nothing has been logged or printed for long."""
        if self._stall.is_due(self._crew.progress()):
            seconds = self._stall.seconds
            self._state.hang = f"Nothing has been logged or printed for {seconds:.0f} s: {self.report(feed)}"
        elif not self._stall.reported:
            self._state.hang = ""
