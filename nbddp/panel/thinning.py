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
    """About ``points`` points of a spread, each as wide as the widest one up to the points beside it.

    The width is measured from the middle of the spread: where all ranks have the same values it is hardly more than
    zero, however steep the curve is.
    """
    steps, low, high = spread
    count = len(steps)
    known = np.isfinite(low) & np.isfinite(high)
    if count <= points or not known.any():
        return spread
    starts = np.linspace(0, count, max(2, points - 1)).astype(int)[:-1]
    centers = np.unique(np.concatenate([[0], (starts + np.append(starts[1:], count)) // 2, [count - 1]]))
    middle = np.interp(steps, steps[known], low[known] / 2 + high[known] / 2)
    with np.errstate(invalid="ignore", over="ignore"):
        line = np.interp(steps, steps[centers], middle[centers])
        below, above = (_widest(width, centers) for width in (line - low, high - line))
        return Spread(steps[centers], middle[centers] - below, middle[centers] + above)


def _widest(widths: npt.NDArray[np.float64], at: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """At each of the points ``at``, the largest width from the point before to the point after; NaN counts as none."""
    between = np.fmax.reduceat(widths, at)  # up to the next of these points
    widest: npt.NDArray[np.float64] = np.fmax(between, np.append(between[:1], between[:-1]))
    return widest


def stride(series: Series) -> float:
    """The usual distance between two steps, 0.0 with fewer than two points."""
    steps = series.steps[:100]
    return float(np.median(np.diff(steps))) if len(steps) > 1 else 0.0
