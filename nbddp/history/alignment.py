"""Finds the values of several ranks that belong to the same point.

Where ``log()`` counted the steps, the n-th value of a rank belongs to the n-th of the others, whatever else they log.
Values of one explicit step belong together; if a rank logs a step several times, its k-th value belongs to the k-th of
the others. The result depends on what each rank logged, in its own order, and not on whose bytes arrived first.
"""

from __future__ import annotations

import bisect
from array import array

import numpy as np
import numpy.typing as npt

from nbddp.history.columns import Column

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

ABSENT = -1  # in place of a row: this rank has no value in the point
_COUNTED = -1  # in place of a repeat: log() counted the step of this value
_AFTER_ALL = np.iinfo(np.int64).max  # sorts a point behind every row


class PendingRows:
    """The values of one rank that are not in a point yet. Values with the same key and repeat belong together.

    Attributes:
        rows: their rows in the rank's column.
        keys: of a value whose step log() counted, its number; otherwise its step.
        repeats: how often the rank had logged that explicit step before.
    """

    def __init__(self, column: Column) -> None:
        self._scanned = column.attempt_start
        self._key_counter = _KeyCounter()
        self.rows, self.keys, self.repeats = (np.empty(0, np.int64) for _ in range(3))

    def scan(self, column: Column) -> None:
        """Add the rows that the column has gained since the last call."""
        if self._scanned == len(column):
            return
        keys, repeats = self._key_counter.assign(*column.keys(self._scanned))
        self.rows = np.append(self.rows, np.arange(self._scanned, len(column)))
        self.keys, self.repeats = np.append(self.keys, keys), np.append(self.repeats, repeats)
        self._scanned = len(column)

    def keep(self, which: Bools | slice) -> None:
        self.rows, self.keys, self.repeats = self.rows[which], self.keys[which], self.repeats[which]


class _KeyCounter:
    """Counts the values of one rank: all whose step log() counted, and those of each explicit step."""

    def __init__(self) -> None:
        self._counted = 0
        self._rising = array("q")  # the explicit steps that were higher than all before
        self._repeats: dict[int, int] = {}  # how often each explicit step was logged out of order

    def assign(self, steps: Ints, counted: Bools) -> tuple[Ints, Ints]:
        """The key and the repeat of each value; see :class:`PendingRows`."""
        ordinals = self._counted + np.cumsum(counted) - 1
        self._counted += int(np.count_nonzero(counted))
        explicit = steps[~counted]
        repeats = np.full(len(steps), _COUNTED)
        higher = len(explicit) > 0 and (not self._rising or explicit[0] > self._rising[-1])
        if higher and bool(np.all(explicit[1:] > explicit[:-1])):  # the usual case, without a loop in Python
            self._rising.frombytes(explicit.tobytes())
            repeats[~counted] = 0
        else:
            repeats[~counted] = [self._repeat(step) for step in explicit.tolist()]
        return np.where(counted, ordinals, steps), repeats

    def _repeat(self, step: int) -> int:
        if not self._rising or step > self._rising[-1]:
            self._rising.append(step)
            return 0
        repeats = self._repeats.get(step, 0)
        self._repeats[step] = repeats + 1
        return repeats + (self._rising[bisect.bisect_left(self._rising, step)] == step)


def align(pending: list[PendingRows]) -> Ints | None:
    """Take out the values that every rank has, if all ranks logged in the same order; None if they did not.

    Returns:
        the points' rows, shape (ranks, points).
    """
    first, number = pending[0], min(len(each.rows) for each in pending)
    for each in pending[1:]:
        for mine, other in ((first.keys, each.keys), (first.repeats, each.repeats)):
            if not np.array_equal(mine[:number], other[:number]):
                return None
    rows = np.array([each.rows[:number] for each in pending])
    for each in pending:
        each.keep(slice(number, None))
    return rows


def group(pending: list[PendingRows], *, partial: bool) -> Ints:
    """Take out the values that every rank has logged, in any order; with ``partial`` all values.

    Returns:
        the points' rows, shape (ranks, points), with ``ABSENT`` for ranks that have no value in a point.
    """
    lengths = [len(each.rows) for each in pending]
    ranks = np.repeat(np.arange(len(pending)), lengths)
    keys, repeats = (np.concatenate([getattr(each, name) for each in pending]) for name in ("keys", "repeats"))
    order = np.lexsort((repeats, keys))
    starts = _differs_from_previous(keys[order]) | _differs_from_previous(repeats[order])
    point = np.empty(len(order), np.int64)
    point[order] = np.cumsum(starts) - 1
    rows = np.full((len(pending), int(np.count_nonzero(starts))), ABSENT)
    rows[ranks, point] = np.concatenate([each.rows for each in pending])
    taken = (rows != ABSENT).all(0) | partial
    for each, points in zip(pending, np.split(point, np.cumsum(lengths)[:-1])):
        each.keep(~taken[points])
    heads = order[starts]
    return rows[:, taken][:, _point_order(rows[0, taken], keys[heads][taken], repeats[heads][taken])]


def _point_order(rows: Ints, keys: Ints, repeats: Ints) -> Ints:
    """The order of the points: as the lowest rank logged them.

    A point that the lowest rank did not log comes after its point of the next lower key.

    Args:
        rows: of the points, in the lowest rank's column.
    """
    present = rows != ABSENT
    if present.all():
        return np.argsort(rows)
    by_key = np.lexsort((keys, repeats))
    anchors = np.where(present, rows, _AFTER_ALL)
    anchors[by_key] = _anchors(anchors[by_key], present[by_key], repeats[by_key])
    return np.lexsort((keys, repeats, ~present, anchors))


def _anchors(rows: Ints, present: Bools, repeats: Ints) -> Ints:
    """Fill in the rows that are not present: with the row before of the same repeat, else one below the row after."""
    number = np.arange(len(rows))
    before = np.maximum.accumulate(np.where(present, number, -1))
    after = np.minimum.accumulate(np.where(present, number, len(rows))[::-1])[::-1]
    has_before = (before >= 0) & (repeats[before] == repeats)
    after[after == len(rows)] = -1
    has_after = (after >= 0) & (repeats[after] == repeats)
    found = np.where(has_before, rows[before], np.where(has_after, rows[after] - 1, _AFTER_ALL))
    return np.where(present, rows, found)


def _differs_from_previous(numbers: Ints) -> Bools:
    """Whether each number differs from the one before it; True for the first."""
    return np.append(True, numbers[1:] != numbers[:-1])
