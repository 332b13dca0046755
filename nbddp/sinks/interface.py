"""The interface of a sink, and what is handed to it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from nbddp.history.history import History


class Points(NamedTuple):
    """New points of one metric, in the order in which they were logged.

    Attributes:
        steps: int64, shape (n,).
        values: float64, shape (n,); with ``reduce=`` combined over the ranks.
        times: float64, shape (n,): when they were logged, in seconds since 1970.
    """

    name: str
    steps: npt.NDArray[np.int64]
    values: npt.NDArray[np.float64]
    times: npt.NDArray[np.float64]


class Row(NamedTuple):
    """The metrics of one step."""

    step: int
    time: float
    values: dict[str, float]


class Sink(Protocol):
    """Receives the metrics of one run, on a thread of its own. What it raises ends it, and not the run.

    Attributes:
        name: for messages: ``"csv:runs/a.csv"``, ``"SummaryWriter"``.
    """

    name: str

    def write(self, points: Sequence[Points], history: History) -> None:
        """Take over the points that are new since the last call. ``history`` is the whole run's."""

    def close(self, history: History) -> None:
        """The run is over: make everything durable, and close what nbddp has opened."""


def rows(points: Sequence[Points]) -> Iterator[Row]:
    """The same points as one row per step. A step that was logged twice under one name is two rows."""
    found: dict[tuple[int, int], Row] = {}
    for name, steps, values, times in points:
        seen: dict[int, int] = {}
        for step, value, time in zip(steps.tolist(), values.tolist(), times.tolist()):
            seen[step] = seen.get(step, 0) + 1
            row = found.setdefault((step, seen[step]), Row(step, time, {}))
            row.values[name] = value
    yield from sorted(found.values(), key=lambda row: row.time)
