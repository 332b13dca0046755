"""Kernel side. The picture that stays: curves as SVG and a run's last state as HTML, both without script."""

from __future__ import annotations

import base64
import itertools
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from nbddp.kernel.history import History, Series, Spread
from nbddp.panel import summary
from nbddp.panel.summary import plain
from nbddp.panel.text import end_text
from nbddp.panel.view import Source, Status
from nbddp.wire import fold

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SMOOTHING = 0.85
LIMIT_BYTES = 110_000  # of the SVG; the notebook's file holds it as base64 and a table beside it
_SPARSE = 30  # fewer points than this, or a fifth of the densest line's, are dots and not smoothed
_CHARTS = 12
_NAMED = 8  # of the families for which there is no chart
_LINES = 24  # in one chart, at first
_ROWS = 40  # of the table of metrics
_NAME_CHARS = 60
_POINTS = 6_000  # of all lines together, at first
_LOG_LINES = 12
_HANG_CHARS = 6_000
_LINE_CHARS = 300
_LARGEST = 1e300  # of what is drawn: the difference of two such numbers is a number too
_APART = 1e-12  # of a number's size; what lies closer together is a flat line
_COLOUR_CODES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")

# Seen on white and on near-black: a saved notebook does not know the theme of who opens it.
_COLORS = ("#3b7df0", "#e0661f", "#22994f", "#a457e0", "#1492ac", "#d63f7c", "#b07a10", "#7c8696")
_PLACES = {"train": 0, "val": 1, "valid": 1, "validation": 1, "eval": 1, "dev": 1, "test": 2}
_TEXT = "#7d7d7d"
_GRID = "#808080"
_MARK = "#b07a10"
_STATE_COLORS = {"finished": "#22994f", "failed": "#d9453d", "stopped": "#b07a10"}
_FONT = "system-ui,-apple-system,'Segoe UI',Roboto,'Helvetica Neue',sans-serif"

_WIDTH, _HEIGHT = 744, 218  # of the whole picture, of one row of charts
_NOTE = 22  # below the charts
_MARKS = 20  # restarts, the newest
_GAP, _LEFT, _TOP, _BOTTOM = 22, 44, 32, 24


@dataclass(frozen=True)
class _Line:
    metric: summary.Metric
    color: str
    last: float
    series: Series
    spread: Spread
    sparse: bool


@dataclass(frozen=True)
class _Family:
    lines: list[_Line]
    undrawn: int


@dataclass(frozen=True)
class _Charts:
    """All that is drawn.

    Attributes:
        undrawn: titles of the families for which there is no room.
    """

    families: list[_Family]
    undrawn: list[str]
    marks: list[summary.Mark]

    @property
    def note(self) -> str:
        if not self.undrawn:
            return ""
        names = ", ".join(title[:_NAME_CHARS] for title in self.undrawn[:_NAMED])
        rest = f", … and {len(self.undrawn) - _NAMED:,} more" if len(self.undrawn) > _NAMED else ""
        return f"Not drawn: {names}{rest}"


@dataclass(frozen=True)
class _Box:
    """Where a chart's data lie in the picture, and which part of the data it shows."""

    x: float
    y: float
    width: float
    height: float
    x_range: tuple[float, float]
    y_range: tuple[float, float]

    def px(self, steps: npt.NDArray[Any]) -> npt.NDArray[Any]:
        low, high = self.x_range
        return self.x + (steps - low) / (high - low) * self.width

    def py(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        low, high = self.y_range
        return self.y + self.height - (values - low) / (high - low) * self.height


class Picture:
    """A history's curves, one chart per family of metrics; with a status also the run's end in words.

    Shows itself in a notebook. ``svg`` is the image as text, ``figure()`` the same with matplotlib.
    """

    def __init__(self, history: History, status: Status | None = None, source: Source | None = None) -> None:
        self._history = history
        self._status = status
        self._source = source

    @property
    def svg(self) -> str:
        """The charts as an SVG document, readable on light and dark; at most 110 kB."""
        points, lines = _POINTS, _LINES
        while True:
            text = _draw(charts(self._history, points, lines))
            if len(text.encode()) <= LIMIT_BYTES or lines == 1:
                return text
            # Fewer points first; when each line has its least, fewer lines.
            points, lines = (points // 2, lines) if points > 100 else (points, lines // 2)

    def _repr_mimebundle_(self, **_options: Any) -> dict[str, str]:
        return self.bundle()

    def __repr__(self) -> str:
        if self._status is None:
            return f"Picture({self._history!r})"
        return end_text(self._status, self._history)

    def bundle(self, name: str = "") -> dict[str, str]:
        """What ``display(..., raw=True)`` takes: HTML without script, of this class too, and plain text."""
        return {"text/html": self._html(name), "text/plain": repr(self)}

    def figure(self, *, width: float = 9.0) -> Figure:
        """The same charts as a matplotlib figure, ``width`` inches wide. Needs matplotlib."""
        from matplotlib.figure import Figure

        drawn = charts(self._history, _POINTS)
        columns = min(2, max(1, len(drawn.families)))
        rows = max(1, math.ceil(len(drawn.families) / columns))
        figure = Figure(figsize=(width, rows * width / columns * 0.62), layout="constrained")
        for i, family in enumerate(drawn.families):
            axes = figure.add_subplot(rows, columns, i + 1)
            _plot(axes, family.lines, drawn.marks)
        if drawn.note:
            figure.supxlabel(drawn.note, fontsize="small", parse_math=False)
        return figure

    def _html(self, name: str) -> str:
        parts = [*self._heading(), *self._hang(), *self._image(), *_metrics_table(self._history), *self._last_output()]
        return f'<div class="{f"nbddp-picture {name}".strip()}">{"".join(parts)}</div>'

    def _heading(self) -> Iterable[str]:
        status = self._status
        if status is None:
            return
        color = _STATE_COLORS.get(status.state, _COLORS[0])
        yield (
            f'<p><span style="color:{color}"><b>● {escape(status.state.capitalize())}</b></span> &nbsp;'
            f"<b>{escape(plain(status.name[:_LINE_CHARS]))}</b> &nbsp;"
            f"{escape(' · '.join(self._facts(status)))}</p>"
        )
        if status.restarts:
            yield f'<p style="color:{_MARK}">↻ {escape(summary.restart_text(status)[:_LINE_CHARS])}</p>'
        if status.error:
            yield f'<p style="color:{color}"><b>{escape(plain(status.error[:_LINE_CHARS]))}</b></p>'

    def _facts(self, status: Status) -> Iterable[str]:
        rate = summary.progress(self._history).throughput
        pace = f"{rate:,.0f} samples/s" if rate else ""
        return filter(None, (plain(status.summary), _clock(status.seconds), pace, summary.restart_count(status)))

    def _hang(self) -> Iterable[str]:
        """Of a run that stood still when it ended: where."""
        lines = summary.hang_lines(self._status, _HANG_CHARS) if self._status else []
        if lines:
            first, *rest = lines
            yield f'<details open><summary style="color:{_MARK}"><b>{escape(first[:_LINE_CHARS])}</b></summary>'
            yield f"<pre>{escape(chr(10).join(rest))}</pre></details>"

    def _image(self) -> Iterable[str]:
        if any(len(self._history[name].steps) for name in self._history.names):
            data = base64.b64encode(self.svg.encode()).decode()
            alt = "Curves of " + ", ".join(name[:_NAME_CHARS] for name in self._history.names[:20])
            yield (
                f'<img src="data:image/svg+xml;base64,{data}" alt="{escape(plain(alt))}" width="{_WIDTH}" '
                f'style="width:100%;max-width:{_WIDTH}px;height:auto">'
            )

    def _last_output(self) -> Iterable[str]:
        """Of the rank that failed: what it printed last."""
        status, source = self._status, self._source
        if status is None or source is None or status.failed_rank is None:
            return
        text, _, _ = source.output(status.failed_rank, 0, 128 << 10)
        lines = [line[:_LINE_CHARS] for line in fold(text).rstrip("\n").split("\n")[-_LOG_LINES:] if line]
        if lines:
            yield f"<details open><summary>Last output of rank {status.failed_rank}</summary>"
            yield f"<pre>{escape(_printable(lines))}</pre></details>"


def _clock(seconds: float) -> str:
    """``00:38`` or ``2:03:04``, as the live panel has it."""
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute:02}:{second:02}"


def _printable(lines: Sequence[str]) -> str:
    plain = (_COLOUR_CODES.sub("", line) for line in lines)
    return "\n".join("".join(c for c in line if c == "\t" or c.isprintable()) for line in plain)


def _metrics_table(history: History) -> Iterable[str]:
    named = [(name, history[name]) for name in history.names]
    named = [(name, series) for name, series in named if len(series.steps)]
    rest = len(named) - _ROWS
    if not named:
        return
    headings = ("Metric", "Last", "Lowest", "Highest", "Points")
    yield "<table><thead><tr>" + "".join(f"<th>{text}</th>" for text in headings) + "</tr></thead><tbody>"
    for name, (steps, values) in named[:_ROWS]:
        finite = values[np.isfinite(values)]
        low, high = (f"{finite.min():.4g}", f"{finite.max():.4g}") if len(finite) else ("–", "–")
        cells = [escape(plain(name[:_NAME_CHARS])), f"{values[-1]:.4g}", low, high, f"{len(steps):,}"]
        yield "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"
    if rest > 0:
        yield f'<tr><td colspan="{len(headings)}">and {rest:,} more</td></tr>'
    yield "</tbody></table>"


# ---------------------------------------------------------------------------- the lines


def charts(history: History, points: int, lines: int = _LINES) -> _Charts:
    """The metrics that have points, by family, so many to a chart, thinned to so many points together."""
    groups: dict[str, list[summary.Metric]] = {}
    for name in history.names:
        if len(history[name].steps):
            metric = summary.describe(name)
            groups.setdefault(metric.family, []).append(metric)
    shown = list(groups.values())[:_CHARTS]
    each = points // max(1, sum(min(lines, len(metrics)) for metrics in shown))
    drawn = [_Family(_lines(history, m[:lines], max(16, each)), len(m[lines:])) for m in shown]
    return _Charts(drawn, [m[0].title for m in list(groups.values())[_CHARTS:]], summary.marks(history))


def _lines(history: History, metrics: list[summary.Metric], points: int) -> list[_Line]:
    series = [summary.forward(history[metric.name]) for metric in metrics]
    densest = max(len(s.steps) for s in series)
    return [
        _line(metric, color, s, history.spread(metric.name), points, sparse=len(s.steps) < max(_SPARSE, densest / 5))
        for metric, s, color in zip(metrics, series, _colors(metrics))
    ]


def _line(metric: summary.Metric, color: str, series: Series, spread: Spread, points: int, *, sparse: bool) -> _Line:
    thin, band = summary.thin(series, points), summary.thin_spread(summary.forward(spread), points // 4)
    shown = Series(thin.steps, _drawable(thin.values))
    shown_band = Spread(band.steps, _drawable(band.low), _drawable(band.high))
    return _Line(metric, color, float(series.values[-1]), shown, shown_band, sparse)


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
    usual = summary.stride(series) or 1.0
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


# ---------------------------------------------------------------------------- SVG


def _draw(drawn: _Charts) -> str:
    groups = drawn.families
    columns = 1 if len(groups) == 1 else 2
    height = max(1, math.ceil(len(groups) / columns)) * _HEIGHT
    width = (_WIDTH - _GAP * (columns - 1)) / columns
    parts = [
        _chart(group, drawn.marks, (i % columns) * (width + _GAP), (i // columns) * _HEIGHT, width)
        for i, group in enumerate(groups)
    ]
    if drawn.note:
        parts.append(f'<text x="0" y="{height + 14}">{escape(_cut(drawn.note, _WIDTH))}</text>')
        height += _NOTE
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" '
        f'height="{height}" font-family="{_FONT}" font-size="11" fill="{_TEXT}">{"".join(parts)}</svg>'
    )


def _cut(text: str, width: float) -> str:
    """To what fits, at this font's size."""
    most = int(width / 6)
    return text if len(text) <= most else text[: most - 1] + "…"


def _chart(family: _Family, marks: list[summary.Mark], x: float, y: float, width: float) -> str:
    lines = family.lines
    box = _Box(x + _LEFT, y + _TOP, width - _LEFT - 14, _HEIGHT - _TOP - _BOTTOM, _x_range(lines), _y_range(lines))
    parts = [_legend(family, x, y + 16, width), _axes(box), *(_curves(line, box) for line in lines)]
    return "".join([*parts, *_restarts(marks, box)])


def _restarts(marks: list[summary.Mark], box: _Box) -> Iterable[str]:
    """A dashed line where the ranks began again, its words on the side that has room for them."""
    for mark in _shown_marks(marks, box.x_range):
        at = float(box.px(np.array([mark.step]))[0])
        left = at > box.x + box.width * 0.75
        yield (
            f'<g stroke="{_MARK}" fill="{_MARK}"><title>{escape(mark.text[:_LINE_CHARS])}</title>'
            f'<path d="M{at:.1f} {box.y:.0f}v{box.height:.0f}" stroke-dasharray="4 3"/>'
            f'<text x="{at + (-5 if left else 5):.1f}" y="{box.y + 10:.0f}" stroke="none" '
            f'text-anchor="{"end" if left else "start"}">{escape(mark.label)}</text></g>'
        )


def _shown_marks(marks: list[summary.Mark], x_range: tuple[float, float]) -> list[summary.Mark]:
    return [mark for mark in marks if x_range[0] <= mark.step <= x_range[1]][-_MARKS:]


def _x_range(lines: list[_Line]) -> tuple[float, float]:
    low = min(float(line.series.steps[0]) for line in lines)
    high = max(float(line.series.steps[-1]) for line in lines)
    if _flat(low, high):
        room = max(0.5, abs(low) * 1e-9)
        return low - room, high + room
    return low, high


def _y_range(lines: list[_Line]) -> tuple[float, float]:
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


def _legend(family: _Family, x: float, y: float, width: float) -> str:
    lines = family.lines
    title = lines[0].metric.title[:28]
    parts = [f'<text x="{x:.0f}" y="{y:.0f}" font-size="13" font-weight="700">{escape(title)}</text>']
    if family.undrawn:
        parts.append(f'<text x="{x + width:.0f}" y="{y:.0f}" text-anchor="end">and {family.undrawn:,} more</text>')
        width -= 100
    at = x + 14 + 7.4 * len(title)
    for line in lines:
        alone = len(lines) == 1 and line.metric.label.lower() == line.metric.family
        label = f"{'' if alone else line.metric.label[:24] + ' '}{_short(line.last)}"
        if at + 20 + 6.2 * len(label) > x + width:
            break
        parts.append(f'<path d="M{at:.0f} {y - 4:.0f}h12" stroke="{line.color}" stroke-width="2"/>')
        parts.append(f'<text x="{at + 17:.0f}" y="{y:.0f}" font-size="12">{escape(label)}</text>')
        at += 32 + 6.2 * len(label)
    return "".join(parts)


def _axes(box: _Box) -> str:
    bottom = box.y + box.height
    parts = [f'<g stroke="{_GRID}" stroke-opacity=".28" stroke-width="1">']
    y_ticks, x_ticks = ticks(*box.y_range, 5), ticks(*box.x_range, 5)
    ys, xs = box.py(np.array(y_ticks)).tolist(), box.px(np.array(x_ticks)).tolist()
    parts += [f'<path d="M{box.x:.0f} {y:.1f}h{box.width:.0f}"/>' for y in ys]
    parts += [f'<path d="M{x:.1f} {box.y:.0f}v{box.height:.0f}"/>' for x in xs]
    parts.append("</g>")
    parts += [
        f'<text x="{box.x - 6:.0f}" y="{y + 4:.1f}" text-anchor="end">{_short(t)}</text>' for t, y in zip(y_ticks, ys)
    ]
    parts += [
        f'<text x="{x:.1f}" y="{bottom + 16:.0f}" text-anchor="middle">{_short(t)}</text>' for t, x in zip(x_ticks, xs)
    ]
    return "".join(parts)


def _curves(line: _Line, box: _Box) -> str:
    x, y = box.px(line.series.steps), box.py(line.series.values)
    parts = [_band(line, box)]
    if line.sparse:
        parts.append(_polyline(x, y, line.color, 2.0, 1.0))
        shown = np.isfinite(y)
        parts += [
            f'<circle cx="{a:.1f}" cy="{b:.1f}" r="2.5" fill="{line.color}"/>'
            for a, b in zip(x[shown].tolist(), y[shown].tolist())
        ]
    else:
        parts.append(_polyline(x, y, line.color, 1.0, 0.35))
        parts.append(_polyline(x, box.py(smooth(line.series)), line.color, 2.0, 1.0))
    return "".join(parts)


def _band(line: _Line, box: _Box) -> str:
    if not len(line.spread.steps):
        return ""
    x = box.px(line.spread.steps)
    edge = np.concatenate([x, x[::-1]])
    ys = np.concatenate([box.py(line.spread.high), box.py(line.spread.low)[::-1]])
    return f'<path d="{_path(edge, ys)}Z" fill="{line.color}" fill-opacity=".18"/>'


def _polyline(x: npt.NDArray[Any], y: npt.NDArray[Any], color: str, width: float, opacity: float) -> str:
    return (
        f'<path d="{_path(x, y)}" fill="none" stroke="{color}" stroke-width="{width:g}" '
        f'stroke-opacity="{opacity:g}" stroke-linejoin="round"/>'
    )


def _path(x: npt.NDArray[Any], y: npt.NDArray[Any]) -> str:
    parts, pen = [], "M"
    for a, b in zip(x.tolist(), y.tolist()):
        if math.isfinite(b):
            parts.append(f"{pen}{a:.1f} {b:.1f}")
            pen = "L"
    return "".join(parts)


def ticks(low: float, high: float, count: int) -> list[float]:
    """About so many round numbers between the two."""
    if not math.isfinite(high - low) or _flat(low, high):
        return [low]
    rough = (high - low) / count
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(size * m for m in (1, 2, 2.5, 5, 10) if size * m >= rough)
    first = math.ceil(low / step - 1e-9)
    return [float(f"{i * step:.12g}") for i in range(first, math.floor(high / step + 1e-9) + 1)]


def _short(value: float) -> str:
    if math.isfinite(value) and 1e4 <= abs(value) < 1e7:
        return f"{value / 1e3:.4g}k" if abs(value) < 1e6 else f"{value / 1e6:.4g}M"
    return f"{value:.4g}".replace("e+0", "e").replace("e-0", "e-")


# ---------------------------------------------------------------------------- matplotlib


def _plot(axes: Any, lines: list[_Line], marks: list[summary.Mark]) -> None:
    for line in lines:
        steps, values = line.series
        options = {"color": line.color, "label": line.metric.label}
        if line.sparse:
            axes.plot(steps, values, marker="o", markersize=3, **options)
        else:
            axes.plot(steps, values, color=line.color, alpha=0.3, linewidth=0.8)
            axes.plot(steps, smooth(line.series), **options)
        if len(line.spread.steps):
            axes.fill_between(line.spread.steps, line.spread.low, line.spread.high, color=line.color, alpha=0.18)
    for mark in _shown_marks(marks, _x_range(lines)):
        axes.axvline(mark.step, color=_MARK, linestyle="--", linewidth=1)
        place = {"xy": (mark.step, 1), "xycoords": ("data", "axes fraction"), "textcoords": "offset points"}
        axes.annotate(mark.label, xytext=(4, -10), color=_MARK, fontsize="small", **place)
    axes.set_title(lines[0].metric.title, loc="left", parse_math=False)
    axes.set_xlabel("step")
    axes.grid(alpha=0.25)
    for text in axes.legend(frameon=False).get_texts():
        text.set_parse_math(False)  # a $ in a name is no formula
