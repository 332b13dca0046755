"""Chooses what is drawn: charts of metrics, a few hundred points per line, colors, marks. Both painters draw this."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import dataclass, field

import numpy as np

from nbddp.history.history import History
from nbddp.history.points import Points

POINTS = 360  # of a line at most: about one per pixel
MAX_CHARTS, MAX_LINES = 12, 8
SMOOTHING = 0.02  # a mean reaches over this share of a line's points
_FEW = 30  # a line with fewer points is drawn with dots
_STAGES = {"train": 0, "training": 0, "val": 1, "valid": 1, "validation": 1, "eval": 1, "dev": 1, "test": 2}
_STAGE_FIRST = re.compile(rf"(?P<stage>{'|'.join(_STAGES)})[/_.\- ]+(?P<rest>.+)", re.IGNORECASE)
_STAGE_LAST = re.compile(rf"(?P<rest>.+?)[/_.\- ]+(?P<stage>{'|'.join(_STAGES)})", re.IGNORECASE)
_TITLES = {"acc": "Accuracy", "lr": "Learning rate", "ppl": "Perplexity"}
# Readable on white and on near-black: the same colors live and saved, in every theme.
COLORS = ("#3b7df0", "#e0661f", "#22994f", "#a457e0", "#1492ac", "#d63f7c", "#b07a10", "#7c8696")
GRAY, RED, AMBER = "#8a8a8a", "#d9453d", "#b07a10"


@dataclass(frozen=True)
class Line:
    """A curve; ``low`` and ``high`` are the extremes of the values around a point, over the ranks."""

    label: str
    color: str
    x: np.ndarray
    y: np.ndarray
    low: np.ndarray
    high: np.ndarray
    last: float
    count: int
    ghost: bool = False

    @property
    def dots(self) -> bool:
        return self.count < _FEW

    @property
    def smooth(self) -> np.ndarray | None:
        """The mean of the points around each point; None for a line that is smooth already."""
        turns = np.diff(np.sign(np.diff(self.y[np.isfinite(self.y)])))
        if len(self.y) < 100 or np.count_nonzero(turns) < len(self.y) / 4:
            return None
        window = np.ones(2 * round(len(self.y) * SMOOTHING / 2) + 1)
        known = np.isfinite(self.y)
        sums = np.convolve(np.where(known, self.y, 0.0), window, "same")
        with np.errstate(invalid="ignore"):
            return np.where(known, sums / np.convolve(known, window, "same"), np.nan)


@dataclass
class Chart:
    """The metrics of one family: ``train/loss`` and ``val/loss``."""

    title: str
    lines: list[Line] = field(default_factory=list)
    marks: list[tuple[float, str, str]] = field(default_factory=list)  # step, text, color
    left_out: int = 0


def described(name: str) -> tuple[str, str]:
    """The chart and the label of a metric: ``("Loss", "train")`` of ``train/loss``, ``Loss/train``, ``loss_train``."""
    match = _STAGE_FIRST.fullmatch(name) or _STAGE_LAST.fullmatch(name)
    before, _, last = (match["rest"] if match else name).rpartition("/")
    label = " ".join(filter(None, [match["stage"] if match else "", before.replace("/", " ")]))
    return _TITLES.get(last.lower(), capital(last.replace("_", " "))), label


def tile_label(name: str) -> str:
    title, label = described(name)
    return capital(f"{label} {title if title.lower() in _TITLES.values() else title.lower()}".strip())


def capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def charts(
    history: History, before: History | None = None, names: tuple[str, ...] = (), points: int = POINTS
) -> tuple[list[Chart], str]:
    """The charts of these metrics, or of all; ``before``: an earlier run, drawn in gray behind."""
    found: dict[str, Chart] = {}
    left_out: list[str] = []
    for name in names or history:
        title, label = described(name)
        if title not in found and len(found) == MAX_CHARTS:
            left_out.append(title)
            continue
        chart = found.setdefault(title, Chart(title))
        if len([line for line in chart.lines if not line.ghost]) >= MAX_LINES:
            chart.left_out += 1
            continue
        curve = _ascending(history.points(name))
        if not len(curve.steps):
            continue
        if before is not None and name in before:
            chart.lines.insert(0, _line(_ascending(before.points(name)), "before", GRAY, points, ghost=True))
        chart.lines.append(_line(curve, label, "", points))
        chart.marks += _broken_mark(curve)
    for chart in found.values():
        _paint(chart)
        chart.marks += [(r.step, "restart", AMBER) for r in history.restarts if r.step is not None]
    titles = dict.fromkeys(left_out)
    rest = (
        f"Not drawn: {', '.join([*titles][:8])}{f' and {len(titles) - 8} more' if len(titles) > 8 else ''}"
        if titles
        else ""
    )
    return [chart for chart in found.values() if chart.lines], rest


def _line(curve: Points, label: str, color: str, points: int, *, ghost: bool = False) -> Line:
    """The curve in buckets of equally many points, so that the curve keeps its shape while it grows."""
    count = len(curve.steps)
    size = 1 << max(0, math.ceil(math.log2(count / points)))
    last = float(curve.values[-1])
    if size == 1:
        return Line(label, color, curve.steps, curve.values, curve.low, curve.high, last, count, ghost)
    edges = np.arange(0, count, size)
    known = np.isfinite(curve.values)
    with np.errstate(invalid="ignore"):
        mean = np.add.reduceat(np.where(known, curve.values, 0.0), edges) / np.add.reduceat(known, edges)
    low, high = np.fmin.reduceat(curve.low, edges), np.fmax.reduceat(curve.high, edges)
    x = curve.steps[np.minimum(edges + size // 2, count - 1)]
    x[0], x[-1] = curve.steps[0], curve.steps[-1]
    return Line(label, color, x, mean, low, high, last, count, ghost)


def _ascending(curve: Points) -> Points:
    """Of steps that begin again with every epoch only the newest ones."""
    if len(curve.steps) < 2 or bool((np.diff(curve.steps) > 0).all()):
        return curve
    later = np.minimum.accumulate(curve.steps[::-1])[::-1]
    kept = np.append(curve.steps[:-1] < later[1:], True)
    return Points(*(column[kept] for column in curve))


def _broken_mark(curve: Points) -> list[tuple[float, str, str]]:
    if math.isfinite(curve.high[-1] - curve.low[-1]):
        return []
    finite = np.flatnonzero(np.isfinite(curve.high - curve.low))
    first = int(finite[-1]) + 1 if len(finite) else 0
    return [(float(curve.steps[first]), f"NaN from step {curve.steps[first]:,}", RED)]


def _paint(chart: Chart) -> None:
    """train, val and test have the same color in every chart."""
    mine = [line for line in chart.lines if not line.ghost]
    fixed = [_STAGES.get(line.label.partition(" ")[0].lower()) for line in mine]
    fixed = [index if index not in fixed[:i] else None for i, index in enumerate(fixed)]
    free = itertools.cycle([i for i in range(len(COLORS)) if i not in fixed])
    for line, index in zip(mine, fixed):
        object.__setattr__(line, "color", COLORS[next(free) if index is None else index])
