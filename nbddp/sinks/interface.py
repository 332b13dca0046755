"""The interface of a sink, and what is handed to it."""

from __future__ import annotations

import abc
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from nbddp.history.history import History

T = TypeVar("T")


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


class Sink(abc.ABC):
    """Receives the metrics of one run, on a thread of its own.

    Attributes:
        name: for messages: ``"csv:runs/a.csv"``, ``"SummaryWriter"``.
        path: the file that it writes, absolute; two runs cannot write one file.
    """

    name: str
    path: str | None = None

    @abc.abstractmethod
    def write(self, points: Sequence[Points], history: History) -> None:
        """Take over the points that are new since the last call. ``history`` is the whole run's.

        If it raises, it is called again with the same points.
        """

    def close(self, history: History) -> None:  # noqa: B027 - most have nothing to close
        """The run is over: make everything durable, and close what nbddp has opened."""


class Remaining:
    """Goes on with the item that failed when a write is repeated."""

    def __init__(self) -> None:
        self._taken = 0

    def of(self, items: Iterable[T]) -> Iterator[T]:
        """Yield the items that no earlier loop over the same ones has finished with."""
        for item in itertools.islice(items, self._taken, None):
            yield item
            self._taken += 1
        self._taken = 0


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
