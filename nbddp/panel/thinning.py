"""Reduces a curve to the number of points that a screen can show."""

from __future__ import annotations

import itertools
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from nbddp.history.history import Series, Spread

_Columns = TypeVar("_Columns", Series, Spread)


def forward(columns: _Columns) -> _Columns:
    """Drop points whose step is repeated or undercut later: of steps that restart every epoch, keep the newest."""
    steps = columns.steps
    if len(steps) < 2 or bool(np.all(steps[1:] > steps[:-1])):
        return columns
    earliest_after = np.minimum.accumulate(steps[::-1])[::-1]
    kept = np.append(steps[:-1] < earliest_after[1:], True)
    return type(columns)(*(column[kept] for column in columns))


def thin(series: Series, points: int) -> Series:
    """About ``points`` points that look the same: each bucket's lowest and highest, the first and the last."""
    chosen = kept(series, points)
    return Series(series.steps[chosen], series.values[chosen])


def kept(series: Series, points: int) -> npt.NDArray[np.int64]:
    """The indices of the points that ``thin`` keeps."""
    steps, values = series
    if len(steps) <= points:
        return np.arange(len(steps))
    buckets = max(1, (points - 2) // 2)
    edges = np.linspace(0, len(steps), buckets + 1).astype(int)
    # NaN must not be picked as the lowest or the highest of a bucket that has other values.
    finite_low = np.where(np.isnan(values), np.inf, values)
    finite_high = np.where(np.isnan(values), -np.inf, values)
    found = {0, len(steps) - 1}
    for start, end in itertools.pairwise(edges.tolist()):
        found.add(start + int(np.argmin(finite_low[start:end])))
        found.add(start + int(np.argmax(finite_high[start:end])))
    return np.array(sorted(found))


def thin_from_start(series: Series, points: int) -> Series:
    """About ``points`` points, as many of the first half as of the second, and so on: each beginning looks the same.

    A chart may show only the beginning of the curve.
    """
    count, halvings = len(series.steps), 0
    if count <= points:
        return series
    while count >> halvings > points // (halvings + 1):
        halvings += 1
    each = points // (halvings + 1)
    edges = [0, *(count >> power for power in range(halvings, -1, -1))]
    pieces = [Series(series.steps[start:end], series.values[start:end]) for start, end in itertools.pairwise(edges)]
    steps, values = zip(*(thin(piece, each) for piece in pieces))
    return Series(np.concatenate(steps), np.concatenate(values))


def thin_spread(spread: Spread, points: int) -> Spread:
    """At most ``points`` points of a spread, each with the lowest and the highest value up to the next point."""
    count = len(spread.steps)
    if count <= points:
        return spread
    starts = np.unique(np.linspace(0, count - 1, max(2, points)).astype(int))
    low = np.minimum.reduceat(spread.low, starts)
    high = np.maximum.reduceat(spread.high, starts)
    return Spread(spread.steps[starts], low, high)


def stride(series: Series) -> float:
    """The usual distance between two steps, 0.0 with fewer than two points."""
    steps = series.steps[:100]
    return float(np.median(np.diff(steps))) if len(steps) > 1 else 0.0
