"""Draws charts as an SVG document."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np
import numpy.typing as npt

from nbddp.panel import numbers, summary
from nbddp.panel.curves import (
    BROKEN_COLOR,
    Charts,
    Family,
    Line,
    log_ticks,
    mark_color,
    nothing_to_draw,
    shown_marks,
    ticks,
    x_range,
    y_range,
)

_TEXT = "#767676"  # the darkest grey with a contrast of 4.2 on JupyterLab's dark page; it has 4.5 on white
_GRID = "#808080"
FONT = "system-ui,sans-serif"
_UNSCALED = 'vector-effect="non-scaling-stroke"'
_LINE_CHARS = 300
_LABEL_PX = 6.2  # the width of a character of a mark's label, about

WIDTH = 744  # of the whole picture
_HEIGHT = 218  # of one row of charts
_NOTE_HEIGHT = 22  # below the charts
_NOTE_CHARS = WIDTH // 6  # that fit into a line at this font's size
_GAP = 22  # between two charts
_LEFT, _RIGHT, _TOP, _BOTTOM = 44, 18, 32, 24  # between a chart's edges and its box
_BOX_HEIGHT = _HEIGHT - _TOP - _BOTTOM
CHART_TOP = 8  # above the box of a chart without a title
_ANY_WIDTH = (WIDTH - _GAP) // 2 - _LEFT - _RIGHT  # of the curves' coordinates in a chart that the page stretches
_EDGE = 0.06  # of the width; labels that are nearer to an edge end there
STRETCHED_HEIGHT = _HEIGHT - _TOP + CHART_TOP


@dataclass(frozen=True)
class _Box:
    """The area of a chart's curves, and the range of the data that it shows.

    Attributes:
        width: of the curves' coordinates.
        height: of the curves' coordinates.
    """

    width: float
    height: float
    x_range: tuple[float, float]
    y_range: tuple[float, float]

    def across(self, steps: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """From 0 at the left edge to 1 at the right edge."""
        low, high = self.x_range
        return (steps - low) / (high - low)

    def down(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """From 0 at the upper edge to 1 at the lower edge."""
        low, high = self.y_range
        return 1 - (values - low) / (high - low)


@dataclass(frozen=True)
class Stretched:
    """A chart as two SVG documents side by side, so that the right one can be stretched to the page's width.

    Attributes:
        axis: the labels of the values; it must keep its size.
        curves: all else, in whatever width the page gives it: only the curves are stretched, no text and no dots.
        left: width of the axis.
    """

    axis: str
    curves: str
    left: int


def draw(drawn: Charts) -> str:
    """All charts in one document, each with its title and legend."""
    groups = drawn.families
    columns = 1 if len(groups) == 1 else 2
    height = max(1, math.ceil(len(groups) / columns)) * _HEIGHT
    width = (WIDTH - _GAP * (columns - 1)) / columns
    parts: list[str] = []
    for i, group in enumerate(groups):
        x, y = (i % columns) * (width + _GAP), (i // columns) * _HEIGHT
        parts += [_legend(group, x, y + 16, width), *chart(group, drawn.marks, x, y + _TOP, width)]
    if drawn.note:
        note = drawn.note if len(drawn.note) <= _NOTE_CHARS else drawn.note[: _NOTE_CHARS - 1] + "…"
        parts.append(f'<text x="0" y="{height + 14}">{escape(note)}</text>')
        height += _NOTE_HEIGHT
    return _document(f"{WIDTH}", f"{height}", parts, f' viewBox="0 0 {WIDTH} {height}"')


def chart(group: Family, marks: list[summary.Mark], x: float, y: float, width: float) -> list[str]:
    """The axes and curves, in a width that is known; ``y`` is where the highest value is."""
    left = _left(group)
    box = _box(group, width - left - _RIGHT)
    return [*_y_labels(group, box, x + left, y), _inside(x + left, y, f"{box.width:.0f}", _chart(group, marks, box))]


def draw_each(drawn: Charts) -> list[Stretched]:
    """Each chart without its title and its legend."""
    return [_stretched(group, drawn.marks) for group in drawn.families]


def _stretched(group: Family, marks: list[summary.Mark]) -> Stretched:
    left, box = _left(group), _box(group, _ANY_WIDTH)
    labels = _y_labels(group, box, left, CHART_TOP)
    # The margins leave space for half of a dot. In percent, since SVG knows no width "all but 5 px".
    curves = _inside("1%", CHART_TOP, "98%", _chart(group, marks, box))
    return Stretched(
        _document(f"{left}", f"{STRETCHED_HEIGHT}", labels), _document("100%", f"{STRETCHED_HEIGHT}", [curves]), left
    )


def _document(width: str, height: str, parts: Iterable[str], more: str = "") -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}"{more} font-family="{FONT}" '
        f'font-size="11" fill="{_TEXT}">{"".join(parts)}</svg>'
    )


def _inside(x: float | str, y: float, width: str, parts: Iterable[str]) -> str:
    """A box of its own, in which percentages count."""
    return f'<svg x="{x}" y="{y}" width="{width}" height="{_BOX_HEIGHT}" overflow="visible">{"".join(parts)}</svg>'


def _box(group: Family, width: float) -> _Box:
    return _Box(width, _BOX_HEIGHT, x_range(group.lines), y_range(group))


def _left(group: Family) -> int:
    """The width of the labels of the values."""
    return max(_LEFT, math.ceil(12 + _LABEL_PX * max(map(len, _y_ticks(y_range(group), group.log)[1]), default=0)))


def _chart(group: Family, marks: list[summary.Mark], box: _Box) -> list[str]:
    """What is in the box, and the labels of the steps below it."""
    parts = [_curves(group, box), *_marks(shown_marks(group, marks), box), *_nothing(nothing_to_draw(group))]
    return [*parts, *_x_labels(box)]


def _y_ticks(heights: tuple[float, float], log: bool) -> tuple[list[float], list[str]]:
    """Where the ticks are, and what they say."""
    found = (log_ticks if log else ticks)(*heights, 5)
    return found, numbers.log_ticks([10.0**tick for tick in found]) if log else numbers.ticks(found)


def _nothing(text: str) -> Iterable[str]:
    """The reason in the middle of a chart without a visible line."""
    if text:
        yield f'<text x="50%" y="50%" text-anchor="middle">{text}</text>'


def _marks(marks: list[summary.Mark], box: _Box) -> Iterable[str]:
    """A dashed line for each mark, with its label on the side that has more space."""
    for mark in marks:
        color, at = mark_color(mark), float(box.across(np.array([mark.step]))[0])
        dx, anchor = (-5, "end") if at > 0.5 else (5, "start")
        yield (
            f'<g stroke="{color}"><title>{escape(mark.text[:_LINE_CHARS])}</title>'
            f'<line x1="{_percent(at)}" x2="{_percent(at)}" y2="100%" stroke-dasharray="4 3"/>'
            f'<text x="{_percent(at)}" dx="{dx}" y="10" stroke="none" '
            f'text-anchor="{anchor}">{escape(mark.label)}</text></g>'
        )


def _legend(family: Family, x: float, y: float, width: float) -> str:
    lines = family.lines
    title = lines[0].metric.title[:28]
    parts = [f'<text x="{x:.0f}" y="{y:.0f}" font-size="13" font-weight="700">{escape(title)}</text>']
    if family.undrawn:
        parts.append(f'<text x="{x + width:.0f}" y="{y:.0f}" text-anchor="end">and {family.undrawn:,} more</text>')
        width -= 100
    at = x + 14 + 7.4 * len(title)
    for line in lines:
        alone = len(lines) == 1 and line.metric.label.lower() == line.metric.family
        label = f"{'' if alone else line.metric.label[:24] + ' '}{numbers.metric(line.last)}"
        if at + 20 + 6.2 * len(label) > x + width:
            break
        parts.append(f'<path d="M{at:.0f} {y - 4:.0f}h12" stroke="{line.color}" stroke-width="2"/>')
        red = "" if math.isfinite(line.last) else f' fill="{BROKEN_COLOR}"'
        parts.append(f'<text x="{at + 17:.0f}" y="{y:.0f}" font-size="12"{red}>{escape(label)}</text>')
        at += 32 + 6.2 * len(label)
    return "".join(parts)


def _y_labels(group: Family, box: _Box, right: float, top: float) -> Iterable[str]:
    found, labels = _y_ticks(box.y_range, group.log)
    ys = top + 4 + box.down(np.array(found)) * box.height
    yield '<g text-anchor="end">'
    yield from (f'<text x="{right - 6:.0f}" y="{y:.1f}">{label}</text>' for label, y in zip(labels, ys.tolist()))
    yield "</g>"


def _x_labels(box: _Box) -> Iterable[str]:
    found = _x_ticks(box)
    for label, x in zip(numbers.ticks(found), box.across(np.array(found)).tolist()):
        anchor = "start" if x < _EDGE else "end" if x > 1 - _EDGE else "middle"
        yield f'<text x="{_percent(x)}" y="100%" dy="16" text-anchor="{anchor}">{label}</text>'


def _x_ticks(box: _Box) -> list[float]:
    return ticks(*box.x_range, 5, whole=True)


def _curves(group: Family, box: _Box) -> str:
    """All that is stretched with the box."""
    parts = [_grid(group, box), *(_curve(line, box) for line in group.lines)]
    view = f'viewBox="0 0 {box.width:.0f} {box.height:.0f}" preserveAspectRatio="none"'
    return f'<svg width="100%" height="100%" {view} overflow="visible" fill="none">{"".join(parts)}</svg>'


def _grid(group: Family, box: _Box) -> str:
    ys = box.down(np.array(_y_ticks(box.y_range, group.log)[0])) * box.height
    xs = box.across(np.array(_x_ticks(box))) * box.width
    rows = "".join(f"M0 {y:.1f}h{box.width:.0f}" for y in ys.tolist())
    columns = "".join(f"M{x:.1f} 0v{box.height:.0f}" for x in xs.tolist())
    options = f'stroke="{_GRID}" stroke-opacity=".28" shape-rendering="crispEdges"'
    return f'<path d="{rows}{columns}" {options} {_UNSCALED}/>'


def _curve(line: Line, box: _Box) -> str:
    x, y = box.across(line.series.steps) * box.width, box.down(line.series.values) * box.height
    parts = [_band(line, box)]
    if line.sparse or line.mean is None:
        parts.append(_polyline(x, y, line.color, 2.0, 1.0))
    else:
        parts.append(_polyline(x, y, line.color, 1.0, 0.35))
        parts.append(_polyline(x, box.down(line.mean) * box.height, line.color, 2.0, 1.0))
    return "".join([*parts, _dots(x, y, line.color) if line.sparse else ""])


def _band(line: Line, box: _Box) -> str:
    """The range of the ranks' values around the line; nothing where all ranks have the same values."""
    steps, low, high = line.spread
    if not np.any(high > low):
        return ""
    edge = box.across(steps) * box.width
    xs, ys = np.concatenate([edge, edge[::-1]]), box.down(np.concatenate([high, low[::-1]])) * box.height
    return f'<path d="{draw_path(xs, ys)}Z" fill="{line.color}" fill-opacity=".18"/>'


def _dots(x: npt.NDArray[Any], y: npt.NDArray[Any], color: str) -> str:
    """Lines of no length, whose round ends stay round when the box is stretched."""
    shown = np.isfinite(y)
    points = "".join(f"M{a:.1f} {b:.1f}h0" for a, b in zip(x[shown].tolist(), y[shown].tolist()))
    return f'<path d="{points}" stroke="{color}" stroke-width="5" stroke-linecap="round" {_UNSCALED}/>'


def _percent(share: float) -> str:
    return f"{round(share * 100, 2):g}%"


def _polyline(x: npt.NDArray[Any], y: npt.NDArray[Any], color: str, width: float, opacity: float) -> str:
    return (
        f'<path d="{draw_path(x, y)}" stroke="{color}" stroke-width="{width:g}" stroke-opacity="{opacity:g}" '
        f'stroke-linejoin="round" {_UNSCALED}/>'
    )


def draw_path(x: npt.NDArray[Any], y: npt.NDArray[Any]) -> str:
    """The line through these points, without those that are not finite, in steps relative to the point before.

    Relative steps are shorter than coordinates. They add up to the rounded coordinates: no error grows along the line.
    """
    visible = np.isfinite(y)
    if not visible.any():
        return ""
    points = np.rint(np.stack([x[visible], y[visible]], 1) * 10).astype(np.int64)
    start, steps = points[0].tolist(), np.diff(points, axis=0).tolist()
    text = f"M{_tenths(start[0])} {_tenths(start[1])}" + ("l" if steps else "")
    parts = [_step(across) + _step(up) for across, up in steps]
    return text + "".join(parts).lstrip()


def _step(tenths: int) -> str:
    """The number, with a blank before it where no sign parts it from the number before."""
    return _tenths(tenths) if tenths < 0 else f" {_tenths(tenths)}"


def _tenths(number: int) -> str:
    """``12``, ``1.5``, ``.5``, ``-.5``: as short as SVG allows."""
    whole, tenth = divmod(abs(number), 10)
    text = f"{whole or ''}.{tenth}" if tenth else f"{whole}"
    return f"-{text}" if number < 0 else text
