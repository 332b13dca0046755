"""Chooses what is drawn: charts of metrics, a few hundred points per line, colors, marks. Both painters draw this."""

import functools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from nbddp.history.history import History
from nbddp.history.points import Points
from nbddp.panel import numbers
from nbddp.text import cut, plain

MAX_CHARTS, MAX_MARKS, MAX_NAMED = 12, 20, 8
SMOOTHING = 0.02  # a mean reaches over this share of a line's points
_FEW = 30  # a line with fewer points is drawn with dots
_STAGES = {"train": 0, "training": 0, "val": 1, "valid": 1, "validation": 1, "eval": 1, "dev": 1, "test": 2}
_STAGE = rf"(?P<stage>{'|'.join(_STAGES)})"
_STAGE_FIRST = re.compile(rf"(?:(?P<before>.*)/)?{_STAGE}[/_.\- ]+(?P<rest>.+)", re.IGNORECASE)
_STAGE_LAST = re.compile(rf"(?P<rest>.+?)[/_.\- ]+{_STAGE}", re.IGNORECASE)
_RATE = re.compile(r"((?:.*[/ ])?(?:lr|learning_rate))(?:[/\-]|_?(?=\d+$))(.+)", re.IGNORECASE)  # of a parameter group
_TITLES = {"acc": "Accuracy", "lr": "Learning rate", "ppl": "Perplexity"}
# Readable on white and on near-black: the same colors live and saved, in every theme.
COLORS = ("#3b7df0", "#e0661f", "#22994f", "#a457e0", "#1492ac", "#d63f7c", "#b07a10", "#7c8696")
MAX_LINES = len(COLORS)
GRAY, RED, AMBER = "#8a8a8a", "#d9453d", "#b07a10"


@dataclass
class Line:
    """A curve; ``low`` and ``high`` are the extremes of the values around a point, over the ranks."""

    label: str
    x: np.ndarray
    y: np.ndarray
    low: np.ndarray
    high: np.ndarray
    last: float
    count: int
    ghost: bool = False
    color: str = GRAY

    @property
    def dots(self) -> bool:
        return self.count < _FEW

    @property
    def is_noisy(self) -> bool:
        """Its mean is drawn over it."""
        if len(self.y) < 100:
            return False
        y = self.y[np.isfinite(self.y)]
        rises, falls = y[1:] > y[:-1], y[1:] < y[:-1]
        turns = (rises[1:] != rises[:-1]) | (falls[1:] != falls[:-1])
        return bool(np.count_nonzero(turns) >= len(self.y) / 4)

    @property
    def smooth(self) -> np.ndarray | None:
        """The mean of the points around each point; None for a line that is smooth already."""
        if not self.is_noisy:
            return None
        window = np.ones(2 * round(len(self.y) * SMOOTHING / 2) + 1)
        known = np.isfinite(self.y)
        with np.errstate(invalid="ignore", over="ignore"):
            sums = np.convolve(np.where(known, self.y, 0.0), window, "same")
            return np.where(known, sums / np.convolve(known, window, "same"), np.nan)


@dataclass
class Chart:
    """The metrics of one family: ``train/loss`` and ``val/loss``."""

    title: str
    lines: list[Line] = field(default_factory=list)
    marks: list[tuple[float, str, str]] = field(default_factory=list)  # step, text, color
    left_out: int = 0

    @property
    def own(self) -> list[Line]:
        """Without the earlier run's."""
        return [line for line in self.lines if not line.ghost]


@functools.lru_cache(1_000)  # as many as a history keeps
def described(name: str) -> tuple[str, str]:
    """The chart and the label of a metric: ``("Loss", "train")`` of ``train/loss``, ``Loss/train``, ``loss_train``."""
    word, label = _parted(plain(name))
    return _TITLES.get(word.lower(), capital(word)), label


def tile_label(name: str) -> str:
    word, label = _parted(plain(name))
    word = _TITLES[word.lower()].lower() if word.lower() in _TITLES else word
    return cut(capital((f"{word} {label}" if label[-1:].isdigit() else f"{label} {word}").strip()))


def _parted(name: str) -> tuple[str, str]:
    first, last = _STAGE_FIRST.fullmatch(name), _STAGE_LAST.fullmatch(name)
    if not (first or last) and (rate := _RATE.fullmatch(name)):
        word, label = _parted(rate[1])
        return word, f"{label} {'group ' * rate[2].isdigit()}{rate[2]}".strip()
    match = first or last
    inside, _, word = (match["rest"] if match else name).rpartition("/")
    words = [first["before"], first["stage"], inside] if first else [inside, last["stage"] if last else ""]
    return (word or name).replace("_", " "), " ".join(filter(None, words)).replace("/", " ")


def capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def charts(
    history: History,
    before: History | None = None,
    names: Sequence[str] = (),
    points: int = 360,
    most: int = MAX_CHARTS,
) -> tuple[list[Chart], str]:
    """The charts of these metrics, or of all, and which have none, in a line.

    Args:
        before: an earlier run, drawn in gray behind.
        points: of a line at most: about one per pixel.
        most: charts.
    """
    found: dict[str, Chart] = {}
    left_out: dict[str, None] = {}
    broken, restarts = history.broken, _restarts(history)
    for name in names or history:
        title, label = described(name)
        if title.lower() not in found and len(found) == most:
            left_out[cut(title)] = None
            continue
        curve = _ascending(history.points(name))
        if not len(curve.steps):
            continue
        chart = found.setdefault(title.lower(), Chart(title))
        if len(chart.own) == MAX_LINES:
            chart.left_out += 1
            continue
        if before is not None and name in before and len((old := _ascending(before.points(name))).steps):
            chart.lines.insert(0, _line(old, "earlier run", max(1, points // 2), ghost=True))
        chart.lines.append(_line(curve, cut(label), points))
        if name in broken:
            step, value, _ = broken[name]
            chart.marks.append((step, f"{numbers.metric(value)} since step {step:,}", RED))
    for chart in found.values():
        _paint(chart.own)
        low, high = min(line.x[0] for line in chart.lines), max(line.x[-1] for line in chart.lines)
        marks = [*restarts, *sorted(chart.marks)[:1]]
        chart.marks = [mark for mark in marks if low <= mark[0] <= high][-MAX_MARKS:]
    some = ", ".join([*left_out][:MAX_NAMED])
    more = f", and {len(left_out) - MAX_NAMED} more" if len(left_out) > MAX_NAMED else ""
    return [*found.values()], f"Not drawn: {some}{more}" if some else ""


def _restarts(history: History) -> list[tuple[float, str, str]]:
    """A mark for those before one step: ``restart 1``, ``restarts 1 to 2``."""
    by_step: dict[int, list[int]] = {}
    for number, restart in enumerate(history.restarts, 1):
        if restart.step is not None:
            by_step.setdefault(restart.step, []).append(number)
    texts = {step: f" {n[0]}" if len(n) == 1 else f"s {n[0]} to {n[-1]}" for step, n in by_step.items()}
    return [(step, f"restart{text}", AMBER) for step, text in texts.items()]


def _line(curve: Points, label: str, points: int, *, ghost: bool = False) -> Line:
    """The curve in buckets of equally many points, so that the curve keeps its shape while it grows."""
    count = len(curve.steps)
    size = 1 << max(0, math.ceil(math.log2(count / points)))
    edges = np.arange(0, count, size)
    known = np.isfinite(curve.values)
    with np.errstate(invalid="ignore", over="ignore"):
        mean = np.add.reduceat(np.where(known, curve.values, 0.0), edges) / np.add.reduceat(known.astype(float), edges)
    low, high = np.fmin.reduceat(curve.low, edges), np.fmax.reduceat(curve.high, edges)
    x = curve.steps[np.minimum(edges + size // 2, count - 1)]
    x[0], x[-1] = curve.steps[0], curve.steps[-1]
    return Line(label, x, mean, low, high, float(curve.values[-1]), count, ghost)


def _ascending(curve: Points) -> Points:
    """Of steps that begin again with every epoch only the newest ones."""
    if (curve.steps[1:] > curve.steps[:-1]).all():
        return curve
    later = np.minimum.accumulate(curve.steps[::-1])[::-1]
    kept = np.append(curve.steps[:-1] < later[1:], True)
    return Points(*(column[kept] for column in curve))


def _paint(lines: list[Line]) -> None:
    """train, val and test have the same color in every chart."""
    wanted = [_STAGES.get(line.label.lower()) for line in lines]
    fixed = [None if index in wanted[:i] else index for i, index in enumerate(wanted)]
    free = (i for i in range(len(COLORS)) if i not in fixed)
    for line, index in zip(lines, fixed):
        line.color = COLORS[next(free) if index is None else index]
