"""Combines the values that several ranks logged for one point, with their spread and the number of ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from nbddp import wire
from nbddp.history.alignment import ABSENT, Bools, Ints, PendingRows, align, group
from nbddp.history.columns import Column, Table

_Floats = npt.NDArray[np.float64]


class Spread(NamedTuple):
    """A metric's lowest and highest value over the ranks, at the steps that at least two of them have logged.

    Attributes:
        steps: int64, shape (n,).
        low, high: float64, shape (n,).
    """

    steps: Ints
    low: _Floats
    high: _Floats


class Counts(NamedTuple):
    """How many ranks have logged each step of a metric with ``reduce=``.

    Attributes:
        steps: int64, shape (n,).
        ranks: int64, shape (n,): how many logged it.
        of: int64, shape (n,): how many ranks there were.
    """

    steps: Ints
    ranks: Ints
    of: Ints


class CombinedPoints:
    """The points of one metric over its ranks. Reads the columns only when called, and only their new rows.

    While the ranks may log more, the points are those that all of them have logged. ``close`` adds the others.

    Attributes:
        series: Table of steps, values and times; empty without ``reduce=``.
        spread: Table of a ``Spread``.
        counts: Table of ``Counts``; empty without ``reduce=``.
        version: changes when points that were already handed out have changed.
    """

    def __init__(self) -> None:
        self.version = 0
        self._earlier: list[tuple[npt.NDArray[Any], ...]] = []  # the tables' rows from earlier attempts
        self._pending: dict[int, PendingRows] = {}  # by rank, in order
        self._op = wire.REDUCE_NONE
        self._last_row = ABSENT  # of the last point, in the lowest rank's column
        self._restarted = False  # and no point was added since
        self._closed = False
        self._reset_tables()

    def catch_up(self, columns: Mapping[int, Column], op: int, world_size: int) -> None:
        """Add the points that every rank has logged by now."""
        active = _active(columns)
        all_there = len(active) == world_size if op else len(active) > 1 or len(self.spread) > 0
        if active and all_there and not self._closed:
            self._advance(active, op, world_size)

    def close(self, columns: Mapping[int, Column], op: int, world_size: int, *, broken_off: bool) -> None:
        """The ranks log nothing more: add the remaining points, combined over the ranks that logged them.

        Args:
            broken_off: leave out the points that some rank had not reached yet.
        """
        active = _active(columns)
        if active and not self._closed and (op or len(active) > 1 or len(self.spread)):
            self._advance(active, op, world_size)
            if any(len(pending.rows) for pending in self._pending.values()):
                self._start_over(active, op)
                rows = group(list(self._pending.values()), partial=True)
                if broken_off:
                    reached = min(int(np.flatnonzero(row != ABSENT)[-1]) for row in rows) + 1
                    rows = rows[:, :reached]
                self._append(rows, active, world_size)
        self._closed = True

    def restart(self) -> None:
        """The ranks start again: the steps that they repeat will replace the old ones. Call ``close`` before."""
        self._earlier = [table.columns() for table in self._tables()]
        self._pending = {}
        self._last_row = ABSENT
        self._restarted, self._closed = True, False

    def _advance(self, active: dict[int, Column], op: int, world_size: int) -> None:
        if op != self._op or list(active) != list(self._pending):
            self._start_over(active, op)
        rows = self._take_complete(active)
        if rows.shape[1] and rows[0, 0] <= self._last_row:  # a rank has logged in another order than the lowest rank
            self._start_over(active, op)
            rows = self._take_complete(active)
        self._append(rows, active, world_size)

    def _take_complete(self, active: dict[int, Column]) -> Ints:
        """The rows of the points that every rank has logged, shape (ranks, points)."""
        pending = list(self._pending.values())
        for each, column in zip(pending, active.values()):
            each.scan(column)
        rows = align(pending)
        return group(pending, partial=False) if rows is None else rows

    def _start_over(self, active: dict[int, Column], op: int) -> None:
        """Forget this attempt's points, and scan its columns from their start."""
        if self._last_row != ABSENT:
            self.version += 1
            self._reset_tables()
            self._last_row = ABSENT
            self._restarted = bool(self._earlier)
        self._op = op
        self._pending = {rank: PendingRows(column) for rank, column in active.items()}
        for rank, column in active.items():
            self._pending[rank].scan(column)

    def _append(self, rows: Ints, active: dict[int, Column], world_size: int) -> None:
        """
        Args:
            rows: of the points in each rank's column, shape (ranks, points).
        """
        if not rows.shape[1]:
            return
        self._last_row = int(rows[0].max())
        steps = _of_lowest(rows, [column.steps(row) for row, column in zip(rows, active.values())])
        if self._restarted:
            self._restarted = False
            self.version += sum(table.drop_from(int(steps[0])) for table in self._tables())
        present = rows != ABSENT
        ranks = present.sum(0)
        values = np.array([column.values(row) for column, row in zip(active.values(), rows)])
        shared = ranks > 1
        low, high = _lowest(values, present), -_lowest(-values, present)
        self.spread.extend(steps[shared], low[shared], high[shared])
        if self._op == wire.REDUCE_NONE:
            return
        weights = np.array([column.weights(row) for column, row in zip(active.values(), rows)])
        valid = (ranks == len(active)) | (self._op != wire.REDUCE_SUM)  # a sum over some of the ranks is not the sum
        times = _of_lowest(rows, [column.times_of(row) for row, column in zip(rows, active.values())])
        self.series.extend(steps[valid], _reduced(self._op, values, weights, present)[valid], times[valid])
        self.counts.extend(steps, ranks, np.full(len(steps), world_size))

    def _tables(self) -> tuple[Table, ...]:
        return self.series, self.spread, self.counts

    def _reset_tables(self) -> None:
        self.series, self.spread, self.counts = Table("qdd"), Table("qdd"), Table("qqq")
        for table, columns in zip(self._tables(), self._earlier):
            table.extend(*columns)


def _active(columns: Mapping[int, Column]) -> dict[int, Column]:
    """The columns that have grown since the last restart, by rank, in order."""
    return {rank: columns[rank] for rank in sorted(columns) if columns[rank].attempt_start < len(columns[rank])}


def _of_lowest(rows: Ints, columns: list[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """Each point's entry, from the lowest rank that logged the point.

    Args:
        rows: of the points in each rank's column, shape (ranks, points).
        columns: by rank, the entries at these rows.
    """
    entries = columns[-1]
    for row, column in zip(rows[-2::-1], columns[-2::-1]):
        entries = np.where(row != ABSENT, column, entries)
    return entries


# ---------------------------------------------------------------------------- one value from several, rank by rank


def _reduced(op: int, values: _Floats, weights: _Floats, present: Bools) -> _Floats:
    """
    Args:
        values, weights, present: shape (ranks, points).
    """
    if op == wire.REDUCE_MIN:
        return _lowest(values, present)
    if op == wire.REDUCE_MAX:
        return -_lowest(-values, present)
    with np.errstate(all="ignore"):
        if op == wire.REDUCE_SUM:
            return _total(values, present)
        return _total(values * weights, present) / _total(weights, present)


def _total(values: _Floats, present: Bools) -> _Floats:
    """The sum over the ranks, added in their order; numpy's sum may add in a different order."""
    total = np.zeros(values.shape[1])
    for row, there in zip(values, present):
        total += np.where(there, row, 0.0)
    return total


def _lowest(values: _Floats, present: Bools) -> _Floats:
    """The minimum over the ranks; NaN if a rank has NaN.

    Of 0.0 and -0.0 the lowest rank's is taken; numpy's minimum takes either.
    """
    lowest = np.full(values.shape[1], np.inf)
    for row, there in zip(values, present):
        lowest = np.where(there & ~np.isnan(lowest) & ((row < lowest) | np.isnan(row)), row, lowest)
    return lowest
