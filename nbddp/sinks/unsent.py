"""Reads from a history the points that a sink has not received yet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np

from nbddp.history.columns import Series, Table
from nbddp.history.history import Cursor, History
from nbddp.sinks.interface import Points


class Unsent:
    """The points that are new since the last call of :meth:`take`.

    The history changes points that were handed out when a restart repeats steps, when a lower rank logs the metric as
    well, or when points that some ranks never logged are added at the end. Then those with another step or value than
    any before are handed out.
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
            if len(sent) and cursor.points == len(times):  # from the start: the points have changed
                new = _not_in(Series(*sent.columns()), series)
                series, times = Series(series.steps[new], series.values[new]), times[new]
            sent.extend(*series)
            self._cursors[name] = cursor
            if len(times):
                found.append(Points(name, *series, times))
        return found


def _not_in(old: Series, new: Series) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Which rows of ``new`` are not in ``old``, where a row that is there twice may come twice."""
    sent = Counter(_rows(old))
    found = []
    for row in _rows(new):
        found.append(not sent[row])
        sent[row] -= bool(sent[row])
    return np.array(found, dtype=bool)


def _rows(series: Series) -> Iterator[tuple[int, int]]:
    """Steps and values; the values as bits, so that NaN equals NaN."""
    return zip(series.steps.tolist(), series.values.view(np.int64).tolist())
