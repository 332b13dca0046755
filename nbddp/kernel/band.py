"""Kernel side. A metric's lowest and highest value over the ranks, step by step as they come to it.

Ranks need not log alike: one may skip steps, run ahead, begin later, or stop. Steps may begin anew with
every epoch; such rounds are counted on each rank, so that a point's place is (round, step).
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from nbddp.kernel.columns import Column, view

_Place = tuple[int, int]  # round, step
_BEFORE_ALL: _Place = (-1, 0)


class Spread(NamedTuple):
    """A metric's lowest and highest value over the ranks, at the steps that at least two of them have logged.

    Attributes:
        steps: int64, shape (n,).
        low, high: float64, shape (n,).
    """

    steps: npt.NDArray[np.int64]
    low: npt.NDArray[np.float64]
    high: npt.NDArray[np.float64]


class Band:
    """The spread of one metric as it grows. Looks at the columns only when asked, and then only at what is new.

    Attributes:
        version: another one when steps that were handed out have changed: a rank has joined, or repeats steps.
    """

    def __init__(self) -> None:
        self.version = 0
        self._steps, self._low, self._high = array("q"), array("d"), array("d")
        self._rounds: dict[int, _Rounds] = {}  # by rank
        self._reached = _BEFORE_ALL  # up to here, all that there is has been taken in

    def catch_up(self, columns: Mapping[int, Column], *, over: bool) -> None:
        """Take in the steps that every rank has come to by now; when the run is over, all."""
        if len(columns) < 2:
            return
        if columns.keys() != self._rounds.keys() or any(self._rounds[r].cuts != c.cuts for r, c in columns.items()):
            self._begin_again(columns)
        for rank, column in columns.items():
            self._rounds[rank].scan(column)
        ends = [self._rounds[rank].last(column) for rank, column in columns.items()]
        until = max(ends) if over else min(ends)
        if until > self._reached:
            parts = [self._rounds[rank].part(column, self._reached, until) for rank, column in columns.items()]
            self._reached = until
            self._append(_merged(parts))

    def spread(self, start: int = 0, stop: int | None = None) -> Spread:
        steps, low, high = (view(numbers)[start:stop].copy() for numbers in (self._steps, self._low, self._high))
        return Spread(steps, low, high)

    def _begin_again(self, columns: Mapping[int, Column]) -> None:
        self.version += 1
        self._reached = _BEFORE_ALL
        for numbers in (self._steps, self._low, self._high):
            del numbers[:]
        first = min(columns, key=lambda rank: columns[rank].times[0])
        self._rounds = {first: _Rounds(columns[first], 0)}
        for rank, column in columns.items():
            if rank != first:
                self._rounds[rank] = _Rounds(column, self._rounds[first].when(columns[first], column))

    def _append(self, spread: Spread) -> None:
        self._steps.frombytes(spread.steps.tobytes())
        self._low.frombytes(spread.low.tobytes())
        self._high.frombytes(spread.high.tobytes())


class _Rounds:
    """Where in one rank's column the steps begin anew."""

    def __init__(self, column: Column, number: int) -> None:
        self.cuts = column.cuts
        self._number = number  # of its first round: a rank may begin to log in a later one
        self._starts = array("q", [0])
        self._scanned = 1
        self.scan(column)

    def scan(self, column: Column) -> None:
        steps = view(column.steps)[self._scanned - 1 :]
        self._starts.extend((np.flatnonzero(steps[1:] < steps[:-1]) + self._scanned).tolist())
        self._scanned = len(column)

    def last(self, column: Column) -> _Place:
        return self._number + len(self._starts) - 1, column.steps[-1]

    def part(self, column: Column, after: _Place, until: _Place) -> tuple[npt.NDArray[Any], ...]:
        """Rounds, steps and values of the points between these places."""
        start, stop = self._count(column, after), self._count(column, until)
        rounds = np.searchsorted(view(self._starts), np.arange(start, stop), "right") + (self._number - 1)
        return rounds, view(column.steps)[start:stop].copy(), view(column.values)[start:stop].copy()

    def when(self, column: Column, other: Column) -> int:
        """The round in which another rank logged its first step: that of the same step nearest in time."""
        same = np.flatnonzero(view(column.steps) == other.steps[0])
        apart = np.abs(view(column.times) - other.times[0])
        nearest = same[apart[same].argmin()] if len(same) else apart.argmin()
        return int(np.searchsorted(view(self._starts), nearest, "right")) - 1

    def _count(self, column: Column, until: _Place) -> int:
        """The number of points that are not after this place."""
        round_ = until[0] - self._number
        if round_ < 0:
            return 0
        if round_ >= len(self._starts):
            return self._scanned
        start = self._starts[round_]
        stop = self._starts[round_ + 1] if round_ + 1 < len(self._starts) else self._scanned
        return start + int(np.searchsorted(view(column.steps)[start:stop], until[1], "right"))


def _merged(parts: list[tuple[npt.NDArray[Any], ...]]) -> Spread:
    """Points of several ranks, in order on each, as one spread; of a step logged twice the first value counts."""
    ranks = np.repeat(np.arange(len(parts)), [len(steps) for _, steps, _ in parts])
    rounds, steps, values = (np.concatenate(columns) for columns in zip(*parts))
    order = np.lexsort((steps, rounds))  # stable: ranks stay in order
    ranks, rounds, steps, values = ranks[order], rounds[order], steps[order], values[order]
    begins = _differs(steps) | _differs(rounds)
    kept = begins | _differs(ranks)
    starts = np.flatnonzero(begins[kept])
    shared = np.diff(starts, append=np.count_nonzero(kept)) > 1
    steps, values = steps[kept], values[kept]
    low, high = np.minimum.reduceat(values, starts), np.maximum.reduceat(values, starts)
    return Spread(steps[starts][shared], low[shared], high[shared])


def _differs(numbers: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """From the one before it; the first does."""
    return np.concatenate(([True], numbers[1:] != numbers[:-1]))
