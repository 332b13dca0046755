"""Kernel side. Which lines are drawn and how: families, thinning, colours, smoothing, ranges. Knows no format."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nbddp.kernel.history import History, Series, Spread
from nbddp.panel import summary, thinning

SMOOTHING = 0.85
POINTS = 6_000  # of all lines together, at first
LINES = 24  # in one chart, at first
_CHARTS = 12
_NAMED = 8  # of the families for which there is no chart
_NAME_CHARS = 60
_MARKS = 20  # restarts, the newest
_SPARSE = 30  # fewer points than this, or a fifth of the densest line's, are dots and not smoothed
_LARGEST = 1e300  # of what is drawn: the difference of two such numbers is a number too
_APART = 1e-12  # of a number's size; what lies closer together is a flat line

# Seen on white and on near-black: a saved notebook does not know the theme of who opens it.
_COLORS = ("#3b7df0", "#e0661f", "#22994f", "#a457e0", "#1492ac", "#d63f7c", "#b07a10", "#7c8696")
_PLACES = {"train": 0, "val": 1, "valid": 1, "validation": 1, "eval": 1, "dev": 1, "test": 2}
MARK_COLOR = "#b07a10"


@dataclass(frozen=True)
class Line:
    metric: summary.Metric
    color: str
    last: float
    series: Series
    spread: Spread
    sparse: bool


@dataclass(frozen=True)
class Family:
    lines: list[Line]
    undrawn: int


@dataclass(frozen=True)
class Charts:
    """All that is drawn.

    Attributes:
        undrawn: titles of the families for which there is no room.
    """

    families: list[Family]
    undrawn: list[str]
    marks: list[summary.Mark]

    @property
    def note(self) -> str:
        if not self.undrawn:
            return ""
        names = ", ".join(title[:_NAME_CHARS] for title in self.undrawn[:_NAMED])
        rest = f", … and {len(self.undrawn) - _NAMED:,} more" if len(self.undrawn) > _NAMED else ""
        return f"Not drawn: {names}{rest}"


def charts(history: History, points: int, lines: int = LINES) -> Charts:
    """The metrics that have points, by family, so many to a chart, thinned to so many points together."""
    groups: dict[str, list[summary.Metric]] = {}
    for name in history.names:
        if len(history[name].steps):
            metric = summary.describe(name)
            groups.setdefault(metric.family, []).append(metric)
    shown = list(groups.values())[:_CHARTS]
    each = points // max(1, sum(min(lines, len(metrics)) for metrics in shown))
    drawn = [Family(_lines(history, m[:lines], max(16, each)), len(m[lines:])) for m in shown]
    return Charts(drawn, [m[0].title for m in list(groups.values())[_CHARTS:]], summary.marks(history))


def _lines(history: History, metrics: list[summary.Metric], points: int) -> list[Line]:
    series = [thinning.forward(history[metric.name]) for metric in metrics]
    densest = max(len(s.steps) for s in series)
    return [
        _line(metric, color, s, history.spread(metric.name), points, sparse=len(s.steps) < max(_SPARSE, densest / 5))
        for metric, s, color in zip(metrics, series, _colors(metrics))
    ]


def _line(metric: summary.Metric, color: str, series: Series, spread: Spread, points: int, *, sparse: bool) -> Line:
    thin, band = thinning.thin(series, points), thinning.thin_spread(thinning.forward(spread), points // 4)
    shown = Series(thin.steps, _drawable(thin.values))
    shown_band = Spread(band.steps, _drawable(band.low), _drawable(band.high))
    return Line(metric, color, float(series.values[-1]), shown, shown_band, sparse)


def _drawable(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return np.where(np.isfinite(values), np.clip(values, -_LARGEST, _LARGEST), values)


def _colors(metrics: list[summary.Metric]) -> list[str]:
    """train and val have the same colour in every chart; the others take what is free."""
    chosen: list[int | None] = []
    for metric in metrics:
        place = _PLACES.get(metric.label.lower())
        chosen.append(None if place in chosen else place)
    free = [i for i in range(len(_COLORS)) if i not in chosen]
    rest = itertools.chain(free, itertools.cycle(range(len(_COLORS))))
    return [_COLORS[next(rest) if place is None else place] for place in chosen]


def smooth(series: Series, weight: float = SMOOTHING) -> npt.NDArray[np.float64]:
    """Exponential moving average without its start's bias; a wider gap in steps forgets more."""
    steps, values = series
    usual = thinning.stride(series) or 1.0
    result = np.empty(len(values))
    total = mass = 0.0
    before = steps[0] - usual if len(steps) else 0.0
    for i, (step, value) in enumerate(zip(steps.tolist(), values.tolist())):
        if math.isfinite(value):
            keep = weight ** max(0.0, (step - before) / usual)
            total, mass = total * keep + value * (1 - keep), mass * keep + (1 - keep)
        result[i] = total / mass if mass else math.nan
        before = step
    return result


def shown_marks(marks: list[summary.Mark], x_range: tuple[float, float]) -> list[summary.Mark]:
    return [mark for mark in marks if x_range[0] <= mark.step <= x_range[1]][-_MARKS:]


def x_range(lines: list[Line]) -> tuple[float, float]:
    low = min(float(line.series.steps[0]) for line in lines)
    high = max(float(line.series.steps[-1]) for line in lines)
    if _flat(low, high):
        room = max(0.5, abs(low) * 1e-9)
        return low - room, high + room
    return low, high


def y_range(lines: list[Line]) -> tuple[float, float]:
    values = np.concatenate([column for line in lines for column in (line.series.values, *line.spread[1:])])
    values = values[np.isfinite(values)]
    if not len(values):
        return 0.0, 1.0
    low, high = float(values.min()), float(values.max())
    if _flat(low, high):
        room = abs(low) * 0.1
        room = room if room > 1 / _LARGEST else 1.0
        return low - room, high + room
    room = (high - low) * 0.06
    return (0.0 if 0 <= low < (high - low) * 0.25 else low - room), high + room


def _flat(low: float, high: float) -> bool:
    """Is there so little between the two that float64 can hardly count it?"""
    return high - low <= max(_APART * max(abs(low), abs(high)), 1 / _LARGEST)


def ticks(low: float, high: float, count: int) -> list[float]:
    """About so many round numbers between the two."""
    if not math.isfinite(high - low) or _flat(low, high):
        return [low]
    rough = (high - low) / count
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(size * m for m in (1, 2, 2.5, 5, 10) if size * m >= rough)
    first = math.ceil(low / step - 1e-9)
    return [float(f"{i * step:.12g}") for i in range(first, math.floor(high / step + 1e-9) + 1)]
