"""Kernel side. Which values of several ranks belong together, and what they make: a point, its spread, its ranks.

Where ``log()`` counted the steps, the n-th value of a rank belongs to the n-th of the others, whatever else they log.
Values of one explicit step belong together; of several on a rank, the k-th to the k-th of the others. What comes out
depends on what each rank logged, in its own order, and not on whose bytes came first.
"""

from __future__ import annotations

import bisect
from array import array
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from nbddp import wire
from nbddp.kernel.columns import Column, Table

_Ints = npt.NDArray[np.int64]
_Floats = npt.NDArray[np.float64]
_Bools = npt.NDArray[np.bool_]

_COUNTED = -1  # the turn of a value whose step log() counted
_ABSENT = -1  # the row of a rank that is not in a point
_AFTER_ALL = np.iinfo(np.int64).max  # a row


class Spread(NamedTuple):
    """A metric's lowest and highest value over the ranks, at the steps that at least two of them have logged.

    Attributes:
        steps: int64, shape (n,).
        low, high: float64, shape (n,).
    """

    steps: _Ints
    low: _Floats
    high: _Floats


class Counts(NamedTuple):
    """How many ranks have logged each step of a metric with ``reduce=``.

    Attributes:
        steps: int64, shape (n,).
        ranks: int64, shape (n,): how many logged it.
        of: int64, shape (n,): how many ranks there were.
    """

    steps: _Ints
    ranks: _Ints
    of: _Ints


class Pairs:
    """The points of one metric over its ranks, as they grow. Looks at the columns only when asked, and at what is new.

    While the ranks may log more, the points are those that all of them have logged. ``close`` adds the other ones.

    Attributes:
        series: Table of steps and values, with ``reduce=`` alone.
        spread, counts: Tables of a ``Spread`` and, with ``reduce=`` alone, of ``Counts``.
        version: another one when points that were handed out have changed.
    """

    def __init__(self) -> None:
        self.version = 0
        self._before: list[tuple[npt.NDArray[Any], ...]] = []  # what earlier attempts have left in the tables
        self._waiting: dict[int, _Waiting] = {}  # by rank, in order
        self._op = wire.REDUCE_NONE
        self._last = _ABSENT  # row of the last point in the lowest rank's column
        self._resumes = False
        self._closed = False
        self._fill_tables()

    def catch_up(self, columns: Mapping[int, Column], op: int, world_size: int) -> None:
        """Take in the points that every rank has logged by now."""
        present = _present(columns)
        all_there = len(present) == world_size if op else len(present) > 1 or len(self.spread) > 0
        if present and all_there and not self._closed:
            self._advance(present, op, world_size)

    def close(self, columns: Mapping[int, Column], op: int, world_size: int, *, broken_off: bool) -> None:
        """The ranks log nothing more: take in what is left, of the ranks that logged it.

        Args:
            broken_off: not what some ranks had still to come to.
        """
        present = _present(columns)
        if present and not self._closed and (op or len(present) > 1 or len(self.spread)):
            self._advance(present, op, world_size)
            if any(len(waiting.rows) for waiting in self._waiting.values()):
                self._begin_again(present, op)
                rows = _grouped(list(self._waiting.values()), partial=True)
                self._append(rows[:, : _reached(rows)] if broken_off else rows, present, world_size)
        self._closed = True

    def restart(self) -> None:
        """The ranks begin again: the steps that they repeat will take the place of the old ones. Close it before."""
        self._before = [table.columns() for table in self._tables()]
        self._waiting = {}
        self._last = _ABSENT
        self._resumes, self._closed = True, False

    def _advance(self, present: dict[int, Column], op: int, world_size: int) -> None:
        if op != self._op or list(present) != list(self._waiting):
            self._begin_again(present, op)
        rows = self._paired(present)
        if rows.shape[1] and rows[0, 0] <= self._last:  # a rank has logged in another order than the lowest one
            self._begin_again(present, op)
            rows = self._paired(present)
        self._append(rows, present, world_size)

    def _paired(self, present: dict[int, Column]) -> _Ints:
        waiting = list(self._waiting.values())
        for each, column in zip(waiting, present.values()):
            each.scan(column)
        rows = _aligned(waiting)
        return _grouped(waiting, partial=False) if rows is None else rows

    def _begin_again(self, present: dict[int, Column], op: int) -> None:
        if self._last != _ABSENT:
            self.version += 1
            self._fill_tables()
            self._last = _ABSENT
            self._resumes = bool(self._before)
        self._op = op
        self._waiting = {rank: _Waiting(column) for rank, column in present.items()}
        for rank, column in present.items():
            self._waiting[rank].scan(column)

    def _append(self, rows: _Ints, present: dict[int, Column], world_size: int) -> None:
        """
        Args:
            rows: shape (ranks, points), in each rank's column.
        """
        if not rows.shape[1]:
            return
        self._last = int(rows[0].max())
        steps = _steps(rows, list(present.values()))
        if self._resumes:
            self._resumes = False
            self.version += sum(table.cut(int(steps[0])) for table in self._tables())
        here = rows != _ABSENT
        ranks = here.sum(0)
        values = np.array([column.values(row) for column, row in zip(present.values(), rows)])
        shared = ranks > 1
        low, high = _lowest(values, here), -_lowest(-values, here)
        self.spread.extend(steps[shared], low[shared], high[shared])
        if self._op == wire.REDUCE_NONE:
            return
        weights = np.array([column.weights(row) for column, row in zip(present.values(), rows)])
        whole = (ranks == len(present)) | (self._op != wire.REDUCE_SUM)  # a part of a sum is another number
        self.series.extend(steps[whole], _combined(self._op, values, weights, here)[whole])
        self.counts.extend(steps, ranks, np.full(len(steps), world_size))

    def _tables(self) -> tuple[Table, ...]:
        return self.series, self.spread, self.counts

    def _fill_tables(self) -> None:
        self.series, self.spread, self.counts = Table("qd"), Table("qdd"), Table("qqq")
        for table, columns in zip(self._tables(), self._before):
            table.extend(*columns)


class _Waiting:
    """The values of one rank that are not in a point yet.

    Attributes:
        rows: in its column.
        places, turns: what they pair by.
    """

    def __init__(self, column: Column) -> None:
        self._scanned = column.begin
        self._numbering = _Numbering()
        self.rows, self.places, self.turns = (np.empty(0, np.int64) for _ in range(3))

    def scan(self, column: Column) -> None:
        if self._scanned == len(column):
            return
        places, turns = self._numbering.of(*column.keys(self._scanned))
        self.rows = np.append(self.rows, np.arange(self._scanned, len(column)))
        self.places, self.turns = np.append(self.places, places), np.append(self.turns, turns)
        self._scanned = len(column)

    def keep(self, which: _Bools | slice) -> None:
        self.rows, self.places, self.turns = self.rows[which], self.places[which], self.turns[which]


class _Numbering:
    """Counts the values of one rank: all whose step log() counted, and those of each explicit step."""

    def __init__(self) -> None:
        self._counted = 0
        self._rising = array("q")  # the steps that were higher than all before
        self._again: dict[int, int] = {}  # how often any other was logged

    def of(self, steps: _Ints, counted: _Bools) -> tuple[_Ints, _Ints]:
        """Of each value its place, a number or a step, and its turn there."""
        numbers = self._counted + np.cumsum(counted) - 1
        turns = np.full(len(steps), _COUNTED)
        turns[~counted] = self._turns(steps[~counted])
        self._counted += int(np.count_nonzero(counted))
        return np.where(counted, numbers, steps), turns

    def _turns(self, steps: _Ints) -> _Ints | list[int]:
        if len(steps) and (not self._rising or steps[0] > self._rising[-1]) and bool(np.all(steps[1:] > steps[:-1])):
            self._rising.frombytes(steps.tobytes())
            return np.zeros(len(steps), np.int64)
        return [self._turn(step) for step in steps.tolist()]

    def _turn(self, step: int) -> int:
        if not self._rising or step > self._rising[-1]:
            self._rising.append(step)
            return 0
        again = self._again.get(step, 0)
        self._again[step] = again + 1
        return again + (self._rising[bisect.bisect_left(self._rising, step)] == step)


def _present(columns: Mapping[int, Column]) -> dict[int, Column]:
    """Those that have grown since the last restart, by rank, in order."""
    return {rank: columns[rank] for rank in sorted(columns) if columns[rank].begin < len(columns[rank])}


def _aligned(waiting: list[_Waiting]) -> _Ints | None:
    """Take the values out of which all that can be paired is, if all ranks logged alike; None when they did not."""
    first, number = waiting[0], min(len(each.rows) for each in waiting)
    for each in waiting[1:]:
        for mine, other in ((first.places, each.places), (first.turns, each.turns)):
            if not np.array_equal(mine[:number], other[:number]):
                return None
    rows = np.array([each.rows[:number] for each in waiting])
    for each in waiting:
        each.keep(slice(number, None))
    return rows


def _grouped(waiting: list[_Waiting], *, partial: bool) -> _Ints:
    """Take out the values that every rank has logged, or with ``partial`` all; a column of rows for each point."""
    lengths = [len(each.rows) for each in waiting]
    ranks = np.repeat(np.arange(len(waiting)), lengths)
    places, turns = (np.concatenate([getattr(each, key) for each in waiting]) for key in ("places", "turns"))
    order = np.lexsort((turns, places))
    starts = _differs(places[order]) | _differs(turns[order])
    point = np.empty(len(order), np.int64)
    point[order] = np.cumsum(starts) - 1
    rows = np.full((len(waiting), int(np.count_nonzero(starts))), _ABSENT)
    rows[ranks, point] = np.concatenate([each.rows for each in waiting])
    taken = (rows != _ABSENT).all(0) | partial
    for each, points in zip(waiting, np.split(point, np.cumsum(lengths)[:-1])):
        each.keep(~taken[points])
    heads = order[starts]
    return rows[:, taken][:, _in_order(rows[0, taken], places[heads][taken], turns[heads][taken])]


def _in_order(rows: _Ints, places: _Ints, turns: _Ints) -> _Ints:
    """How to sort the points: as the lowest rank logged them; one that it did not after its own of the step below.

    Args:
        rows: in the lowest rank's column.
    """
    here = rows != _ABSENT
    if here.all():
        return np.argsort(rows)
    by_place = np.lexsort((places, turns))
    anchors = np.where(here, rows, _AFTER_ALL)
    anchors[by_place] = _carried(anchors[by_place], here[by_place], turns[by_place])
    return np.lexsort((places, turns, ~here, anchors))


def _carried(rows: _Ints, here: _Bools, turns: _Ints) -> _Ints:
    """Where the lowest rank is not: the row before in its turn, else what is just below the row after."""
    number = np.arange(len(rows))
    before = np.maximum.accumulate(np.where(here, number, -1))
    after = np.minimum.accumulate(np.where(here, number, len(rows))[::-1])[::-1]
    has_before = (before >= 0) & (turns[before] == turns)
    after[after == len(rows)] = -1
    has_after = (after >= 0) & (turns[after] == turns)
    found = np.where(has_before, rows[before], np.where(has_after, rows[after] - 1, _AFTER_ALL))
    return np.where(here, rows, found)


def _reached(rows: _Ints) -> int:
    """Up to where every rank has come."""
    return min(int(np.flatnonzero(row != _ABSENT)[-1]) for row in rows) + 1


def _differs(numbers: _Ints) -> _Bools:
    """From the one before it; the first does."""
    return np.append(True, numbers[1:] != numbers[:-1])


def _steps(rows: _Ints, columns: list[Column]) -> _Ints:
    """The lowest rank's that logged it."""
    steps = columns[-1].steps(rows[-1])
    for row, column in zip(rows[-2::-1], columns[-2::-1]):
        steps = np.where(row != _ABSENT, column.steps(row), steps)
    return steps


# ---------------------------------------------------------------------------- several values as one, rank by rank


def _combined(op: int, values: _Floats, weights: _Floats, here: _Bools) -> _Floats:
    """
    Args:
        values, weights, here: shape (ranks, points).
    """
    if op == wire.REDUCE_MIN:
        return _lowest(values, here)
    if op == wire.REDUCE_MAX:
        return -_lowest(-values, here)
    with np.errstate(all="ignore"):
        if op == wire.REDUCE_SUM:
            return _total(values, here)
        return _total(values * weights, here) / _total(weights, here)


def _total(values: _Floats, here: _Bools) -> _Floats:
    """In the ranks' order: numpy's own sum may add in another one."""
    total = np.zeros(values.shape[1])
    for row, present in zip(values, here):
        total += np.where(present, row, 0.0)
    return total


def _lowest(values: _Floats, here: _Bools) -> _Floats:
    """NaN where there is one; the first rank's of zeros with another sign, where numpy's minimum takes either."""
    lowest = np.full(values.shape[1], np.inf)
    for row, present in zip(values, here):
        lowest = np.where(present & ~np.isnan(lowest) & ((row < lowest) | np.isnan(row)), row, lowest)
    return lowest
