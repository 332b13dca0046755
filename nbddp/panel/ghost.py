"""The curves of an earlier run, which the panel draws behind the new one's, and their values at the new one's steps."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from nbddp.history.history import Series
from nbddp.panel import thinning
from nbddp.panel.view import Earlier
from nbddp.text import plain

_POINTS = 12_000  # of all metrics together
_POINTS_PER_METRIC = 2_400
_NAME_CHARS = 120
_NOTHING = Series(np.empty(0, np.int64), np.empty(0))


class Ghost:
    """The curves of an earlier run; without one there are none."""

    def __init__(self, earlier: Earlier | None) -> None:
        self._earlier = earlier
        self._names = frozenset(earlier.history.names if earlier else ())
        self._curves: dict[str, Series] = {}  # with ascending steps
        self._thinned: dict[str, Series] = {}

    def description(self) -> dict[str, Any] | None:
        """The earlier run's name, and when it began in unix time."""
        if self._earlier is None:
            return None
        return {"name": plain(self._earlier.name)[:_NAME_CHARS], "began": self._earlier.began}

    def points(self, name: str) -> Series:
        """The metric's curve, thinned for the screen; without points if the earlier run did not log the metric."""
        if name not in self._thinned:
            points = min(_POINTS_PER_METRIC, _POINTS // max(1, len(self._names)))
            self._thinned[name] = thinning.thin_from_start(self._curve(name), points)
        return self._thinned[name]

    def near(self, name: str, step: int) -> tuple[int, float] | None:
        """The nearest logged step and its value; None beyond the curve's ends, and if the value is not finite."""
        steps, values = self._curve(name)
        if not len(steps) or not steps[0] <= step <= steps[-1]:
            return None
        index = int(np.searchsorted(steps, step))
        if index and step - steps[index - 1] <= steps[index] - step:
            index -= 1
        value = float(values[index])
        return (int(steps[index]), value) if math.isfinite(value) else None

    def _curve(self, name: str) -> Series:
        if self._earlier is None or name not in self._names:
            return _NOTHING
        if name not in self._curves:
            self._curves[name] = thinning.forward(self._earlier.history[name])
        return self._curves[name]
