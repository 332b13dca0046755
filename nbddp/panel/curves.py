"""Chooses which curves are drawn and how: families, thinning, colours, smoothing, ranges. Writes no SVG or HTML."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nbddp.history.history import History, Series, Spread
from nbddp.panel import summary, thinning

SMOOTHING = 0.02  # a mean reaches over this share of the points
_MIN_SMOOTHED = 100  # points; a line with fewer is not smoothed
_ROUGH_POINTS = 2_000  # the newest points, which decide whether a line is smooth already
_ROUGH = 0.25  # of noise, two thirds of the points turn; of a schedule or of values per epoch, hardly any
MAX_POINTS = 6_000  # of all lines together; a picture that is too large gets fewer
_POINTS_PER_LINE = 600  # two per pixel of a chart in a row of two
MAX_LINES = 24  # in one chart; a picture that is too large gets fewer
_MAX_CHARTS = 12
_MAX_NAMED = 8  # families without a chart whose titles are listed
_NAME_CHARS = 60
_MAX_MARKS = 20  # the newest restarts
_SPARSE = 30  # a line with fewer points, or under a fifth of the densest line's, is drawn as dots without smoothing
_LARGEST = 1e300  # larger values are clipped, so that the difference of two values is finite
_FLAT = 1e-12  # relative to the values; a smaller range is drawn as a flat line

# Readable on white and on near-black: a saved notebook may be opened with either theme.
_COLORS = ("#3b7df0", "#e0661f", "#22994f", "#a457e0", "#1492ac", "#d63f7c", "#b07a10", "#7c8696")
_STAGE_COLORS = {"train": 0, "val": 1, "valid": 1, "validation": 1, "eval": 1, "dev": 1, "test": 2}
MARK_COLOR = "#b07a10"
BROKEN_COLOR = "#d9453d"


@dataclass(frozen=True)
class Line:
    """A metric's curve.

    Attributes:
        series: the points to draw.
        mean: at each of these points, the mean of the points around it; None if the line is not smoothed.
        sparse: draw dots, too.
    """

    metric: summary.Metric
    color: str
    last: float
    series: Series
    mean: npt.NDArray[np.float64] | None
    spread: Spread
    sparse: bool


@dataclass(frozen=True)
class Family:
    """The metrics of one chart.

    Attributes:
        undrawn: how many lines were left out.
        log: whether the lines hold the decimal logarithms of the values.
    """

    lines: list[Line]
    undrawn: int
    log: bool = False


@dataclass(frozen=True)
class Charts:
    """Everything that a picture draws.

    Attributes:
        undrawn: titles of the families that have no chart.
    """

    families: list[Family]
    undrawn: list[str]
    marks: list[summary.Mark]

    @property
    def note(self) -> str:
        if not self.undrawn:
            return ""
        names = ", ".join(title[:_NAME_CHARS] for title in self.undrawn[:_MAX_NAMED])
        rest = f", … and {len(self.undrawn) - _MAX_NAMED:,} more" if len(self.undrawn) > _MAX_NAMED else ""
        return f"Not drawn: {names}{rest}"


def charts(
    history: History, points: int, lines: int = MAX_LINES, names: Sequence[str] = (), *, log: bool = False
) -> Charts:
    """The charts of all metrics that have points, a chart per family.

    Args:
        points: number of points of all lines together, about.
        lines: highest number of lines in a chart.
        names: the metrics to draw; () for all.
        log: draw the decimal logarithms of the values.
    """
    groups: dict[str, list[summary.Metric]] = {}
    for name in names or history.names:
        if len(history[name].steps):
            metric = summary.describe(name)
            groups.setdefault(metric.family, []).append(metric)
    families = list(groups.values())
    shown, undrawn = families[:_MAX_CHARTS], families[_MAX_CHARTS:]
    each = points // max(1, sum(min(lines, len(metrics)) for metrics in shown))
    each = min(max(16, each), _POINTS_PER_LINE * (2 if len(shown) == 1 else 1))
    drawn = [Family(_lines(history, m[:lines], each, log), len(m[lines:]), log) for m in shown]
    return Charts(drawn, [metrics[0].title for metrics in undrawn], summary.marks(history))


def _lines(history: History, metrics: list[summary.Metric], points: int, log: bool) -> list[Line]:
    full = [thinning.forward(history[metric.name]) for metric in metrics]
    densest = max(len(series.steps) for series in full)
    lines = []
    for metric, series, color in zip(metrics, full, _colors(metrics)):
        kept = thinning.kept(series, points)
        thin = Series(series.steps[kept], series.values[kept])
        band = thinning.forward(history.spread(metric.name))
        shown = Series(thin.steps, _drawable(thin.values, log))
        drawn_band = Spread(band.steps, _drawable(band.low, log), _drawable(band.high, log))
        shown_band = thinning.thin_spread(drawn_band, points // 4)
        sparse = len(series.steps) < max(_SPARSE, densest / 5)
        mean = None if sparse else smooth(series.values, kept)
        drawn = None if mean is None else _drawable(mean, log)
        lines.append(Line(metric, color, float(series.values[-1]), shown, drawn, shown_band, sparse))
    return lines


def _drawable(values: npt.NDArray[np.float64], log: bool) -> npt.NDArray[np.float64]:
    if log:
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(values > 0, np.log10(values), np.nan)
    return np.where(np.isfinite(values), np.clip(values, -_LARGEST, _LARGEST), values)


def _colors(metrics: list[summary.Metric]) -> list[str]:
    """train, val and test have the same colour in every chart; other lines get the remaining colours."""
    chosen: list[int | None] = []
    for metric in metrics:
        index = _STAGE_COLORS.get(metric.label.lower())
        chosen.append(None if index in chosen else index)
    free = [i for i in range(len(_COLORS)) if i not in chosen]
    rest = itertools.chain(free, itertools.cycle(range(len(_COLORS))))
    return [_COLORS[next(rest) if index is None else index] for index in chosen]


def smooth(
    values: npt.NDArray[np.float64], at: npt.NDArray[np.int64], share: float = SMOOTHING
) -> npt.NDArray[np.float64] | None:
    """The mean of the points around each of the points ``at``, over ``share`` of all points.

    Returns:
        NaN at a point that is NaN or infinite itself. None if there are few points, or if the values hardly go up
        and down.
    """
    if len(values) < _MIN_SMOOTHED or not _is_rough(values[-_ROUGH_POINTS:]):
        return None
    reach = math.floor(len(values) * share / 2 + 0.5)
    finite = np.isfinite(values)
    edges = np.ravel([np.maximum(at - reach, 0), np.minimum(at + reach + 1, len(values))], order="F")
    # reduceat takes no index beyond the end, hence the additional zero.
    used = np.append(np.where(finite, np.clip(values, -_LARGEST, _LARGEST), 0.0), 0.0)
    sums = np.add.reduceat(used, edges)[::2]
    counts = np.add.reduceat(np.append(finite, False).astype(np.int64), edges)[::2]
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(finite[at], sums / counts, np.nan)


def _is_rough(values: npt.NDArray[np.float64]) -> bool:
    """Whether the values go up and down, so that a mean shows more than they do."""
    with np.errstate(invalid="ignore", over="ignore"):
        changes = np.diff(values)
    signs = np.sign(changes[np.isfinite(changes) & (changes != 0)])
    return bool(np.count_nonzero(signs[1:] != signs[:-1]) > len(values) * _ROUGH)


def shown_marks(family: Family, marks: list[summary.Mark]) -> list[summary.Mark]:
    """The newest marks of this family's chart."""
    low, high = x_range(family.lines)
    name = family.lines[0].metric.family
    return [mark for mark in marks if mark.family in ("", name) and low <= mark.step <= high][-_MAX_MARKS:]


def mark_color(mark: summary.Mark) -> str:
    return BROKEN_COLOR if mark.family else MARK_COLOR


def nothing_to_draw(family: Family) -> str:
    """Why no line of the chart can be seen; "" if one can."""
    if any(np.isfinite(line.series.values).any() for line in family.lines):
        return ""
    return "no value is positive" if family.log else "every value is NaN or infinite"


def x_range(lines: list[Line]) -> tuple[float, float]:
    low = min(float(line.series.steps[0]) for line in lines)
    high = max(float(line.series.steps[-1]) for line in lines)
    if _flat(low, high):
        margin = max(0.5, abs(low) * 1e-9)
        return low - margin, high + margin
    return low, high


def y_range(family: Family) -> tuple[float, float]:
    lines = family.lines
    values = np.concatenate([column for line in lines for column in (line.series.values, *line.spread[1:])])
    values = values[np.isfinite(values)]
    if not len(values):
        return 0.0, 1.0
    low, high = float(values.min()), float(values.max())
    if family.log and _flat(low, high):
        return low - 0.5, high + 0.5
    if _flat(low, high):
        margin = abs(low) * 0.1
        margin = margin if margin > 1 / _LARGEST else 1.0
        return low - margin, high + margin
    margin = (high - low) * 0.06
    starts_at_zero = not family.log and 0 <= low < (high - low) * 0.25
    return 0.0 if starts_at_zero else low - margin, high + margin


def _flat(low: float, high: float) -> bool:
    """Whether the range is too small for ticks that float64 can tell apart."""
    return high - low <= max(_FLAT * max(abs(low), abs(high)), 1 / _LARGEST)


def ticks(low: float, high: float, count: int, *, whole: bool = False) -> list[float]:
    """About ``count`` round numbers between the two; ``whole``: only whole ones."""
    if not math.isfinite(high - low) or _flat(low, high):
        return [low]
    rough = (high - low) / count
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(size * m for m in (1, 2, 2.5, 5, 10) if size * m >= rough)
    if whole:
        step = max(1.0, math.ceil(step))
    first = math.ceil(low / step - 1e-9)
    return [float(f"{i * step:.12g}") for i in range(first, math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float, count: int) -> list[float]:
    """Decimal logarithms of about ``count`` round numbers, between the logarithms ``low`` and ``high``."""
    if high - low >= 2:
        step = math.ceil((high - low) / count)
        return [float(power) for power in range(math.ceil(low - 1e-9), math.floor(high + 1e-9) + 1, step)]
    powers = range(math.floor(low), math.ceil(high) + 1)
    found = [power + math.log10(digit) for power in powers for digit in (1, 2, 5)]
    found = [tick for tick in found if low <= tick <= high]
    return (
        found if len(found) > 1 else [math.log10(value) for value in ticks(10.0**low, 10.0**high, count) if value > 0]
    )
