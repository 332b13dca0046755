"""Reads from a history the points that a sink has not received yet."""

from __future__ import annotations

import numpy as np

from nbddp.history.columns import Series, Table
from nbddp.history.history import Cursor, History
from nbddp.sinks.interface import Points


class Unsent:
    """The points that are new since the last call of :meth:`take`, each exactly once.

    When points that were handed out become invalid (a restart repeats steps, a lower rank logs the metric as well), the
    points from the first different one on are handed out again.
    """

    def __init__(self, history: History) -> None:
        self._history = history
        self._cursors: dict[str, Cursor] = {}
        self._sent: dict[str, Table] = {}  # steps and values

    def take(self) -> list[Points]:
        """Return the new points of each metric that has any."""
        found = []
        for name, (series, times, cursor) in self._history.timed_points(self._cursors).items():
            sent = self._sent.setdefault(name, Table("qd"))
            if cursor.points == len(times):  # from the start: the first time, or the old points became invalid
                known = _equal_rows(Series(*sent.columns()), series)
                self._sent[name] = sent = Table("qd")
                sent.extend(*(column[:known] for column in series))
                series, times = Series(series.steps[known:], series.values[known:]), times[known:]
            sent.extend(*series)
            self._cursors[name] = cursor
            if len(times):
                found.append(Points(name, *series, times))
        return found


def _equal_rows(old: Series, new: Series) -> int:
    """How many rows both begin with."""
    shared = min(len(old.steps), len(new.steps))
    same = old.steps[:shared] == new.steps[:shared]
    same &= (old.values[:shared] == new.values[:shared]) | (
        np.isnan(old.values[:shared]) & np.isnan(new.values[:shared])
    )
    return shared if same.all() else int(np.argmin(same))
