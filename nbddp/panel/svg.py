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
FONT = "system-ui,-apple-system,'Segoe UI',Roboto,'Helvetica Neue',sans-serif"
_LINE_CHARS = 300
_LABEL_PX = 6.2  # the width of a character of a mark's label, about

WIDTH = 744  # of the whole picture
_HEIGHT = 218  # of one row of charts
CHART_TOP = 8  # above a chart without a title
_NOTE_HEIGHT = 22  # below the charts
_NOTE_CHARS = WIDTH // 6  # that fit into a line at this font's size
_GAP = 22  # between two charts
_LEFT, _RIGHT, _TOP, _BOTTOM = 44, 18, 32, 24  # between a chart's edges and its box


@dataclass(frozen=True)
class _Box:
    """The rectangle of a chart in the picture, and the range of the data that it shows."""

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
    return _document(WIDTH, height, parts)


def draw_each(drawn: Charts) -> list[str]:
    """A document for each chart, without a title and a legend. A chart that has a row for itself is wide."""
    count = len(drawn.families)
    found = []
    for i, group in enumerate(drawn.families):
        width = WIDTH if has_row(i, count) else (WIDTH - _GAP) / 2
        found.append(_document(width, _HEIGHT - _TOP + CHART_TOP, chart(group, drawn.marks, 0, CHART_TOP, width)))
    return found


def has_row(index: int, count: int) -> bool:
    """Whether this chart of ``count`` is alone in its row of two."""
    return index == count - 1 and count % 2 == 1


def _document(width: float, height: float, parts: Iterable[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
        f'height="{height:g}" font-family="{FONT}" font-size="11" fill="{_TEXT}">{"".join(parts)}</svg>'
    )


def chart(group: Family, marks: list[summary.Mark], x: float, y: float, width: float) -> list[str]:
    """The axes and curves; ``y`` is where the highest value is."""
    heights = y_range(group)
    left = max(_LEFT, 12 + _LABEL_PX * max(map(len, _y_ticks(heights, group.log)[1]), default=0))
    size = width - left - _RIGHT, _HEIGHT - _TOP - _BOTTOM
    box = _Box(x + left, y, *size, x_range(group.lines), heights)
    parts = [_axes(box, group.log), *(_curves(line, box) for line in group.lines)]
    return [*parts, *_marks(shown_marks(group, marks), box), *_nothing(nothing_to_draw(group), box)]


def _y_ticks(heights: tuple[float, float], log: bool) -> tuple[list[float], list[str]]:
    """Where the ticks are, and what they say."""
    found = (log_ticks if log else ticks)(*heights, 5)
    return found, numbers.log_ticks([10.0**tick for tick in found]) if log else numbers.ticks(found)


def _nothing(text: str, box: _Box) -> Iterable[str]:
    """The reason in the middle of a chart without a visible line."""
    if text:
        x, y = box.x + box.width / 2, box.y + box.height / 2
        yield f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="middle">{text}</text>'


def _marks(marks: list[summary.Mark], box: _Box) -> Iterable[str]:
    """A dashed line for each mark, with its label on the side that has space for it."""
    for mark in marks:
        color = mark_color(mark)
        at = float(box.px(np.array([mark.step]))[0])
        left = at + 10 + _LABEL_PX * len(mark.label) > box.x + box.width
        yield (
            f'<g stroke="{color}"><title>{escape(mark.text[:_LINE_CHARS])}</title>'
            f'<path d="M{at:.1f} {box.y:.0f}v{box.height:.0f}" stroke-dasharray="4 3"/>'
            f'<text x="{at + (-5 if left else 5):.1f}" y="{box.y + 10:.0f}" stroke="none" '
            f'text-anchor="{"end" if left else "start"}">{escape(mark.label)}</text></g>'
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


def _axes(box: _Box, log: bool) -> str:
    bottom = box.y + box.height
    parts = [f'<g stroke="{_GRID}" stroke-opacity=".28" stroke-width="1">']
    (y_ticks, labels), x_ticks = _y_ticks(box.y_range, log), ticks(*box.x_range, 5, whole=True)
    x_labels = numbers.ticks(x_ticks)
    ys, xs = box.py(np.array(y_ticks)).tolist(), box.px(np.array(x_ticks)).tolist()
    parts += [f'<path d="M{box.x:.0f} {y:.1f}h{box.width:.0f}"/>' for y in ys]
    parts += [f'<path d="M{x:.1f} {box.y:.0f}v{box.height:.0f}"/>' for x in xs]
    parts.append("</g>")
    parts += [
        f'<text x="{box.x - 6:.0f}" y="{y + 4:.1f}" text-anchor="end">{label}</text>' for label, y in zip(labels, ys)
    ]
    parts += [
        f'<text x="{x:.1f}" y="{bottom + 16:.0f}" text-anchor="middle">{label}</text>' for label, x in zip(x_labels, xs)
    ]
    return "".join(parts)


def _curves(line: Line, box: _Box) -> str:
    x, y = box.px(line.series.steps), box.py(line.series.values)
    parts = []
    if len(line.spread.steps):
        edge = box.px(line.spread.steps)
        xs = np.concatenate([edge, edge[::-1]])
        ys = np.concatenate([box.py(line.spread.high), box.py(line.spread.low)[::-1]])
        parts.append(f'<path d="{draw_path(xs, ys)}Z" fill="{line.color}" fill-opacity=".18"/>')
    if line.sparse:
        parts.append(_polyline(x, y, line.color, 2.0, 1.0))
        shown = np.isfinite(y)
        parts += [
            f'<circle cx="{a:.1f}" cy="{b:.1f}" r="2.5" fill="{line.color}"/>'
            for a, b in zip(x[shown].tolist(), y[shown].tolist())
        ]
    elif line.mean is None:
        parts.append(_polyline(x, y, line.color, 2.0, 1.0))
    else:
        parts.append(_polyline(x, y, line.color, 1.0, 0.35))
        parts.append(_polyline(x, box.py(line.mean), line.color, 2.0, 1.0))
    return "".join(parts)


def _polyline(x: npt.NDArray[Any], y: npt.NDArray[Any], color: str, width: float, opacity: float) -> str:
    return (
        f'<path d="{draw_path(x, y)}" fill="none" stroke="{color}" stroke-width="{width:g}" '
        f'stroke-opacity="{opacity:g}" stroke-linejoin="round"/>'
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
