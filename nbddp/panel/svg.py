"""Draws a chart as an SVG document, for a saved notebook and for pages without scripts."""

import re
from collections.abc import Iterable
from html import escape
from typing import Any

import numpy as np

from nbddp.panel import numbers
from nbddp.panel.charts import Chart, Line

HEIGHT = 190
_LEFT, _RIGHT, _TOP, _BOTTOM = 44, 8, 8, 22
_TEXT = "#767676"  # readable on white and on near-black
_LARGEST = 1e300  # beyond, the difference of two values may be infinite
_ZERO = re.compile(r"\b0\.")
_FLAT = 1e-12  # relative to the values; a smaller range has no ticks that can be told apart


def draw(chart: Chart, width: int, *, log: bool = False) -> str:
    """The axes and curves; title and legend are the page's text. ``log``: a logarithmic axis for the values."""
    box = _Box(chart, width, log)
    parts = [*_grid(box), *(part for line in chart.lines for part in _curve(line, box)), *_marks(chart, box)]
    if not any(np.isfinite(box.scaled(line.y)).any() for line in chart.lines):
        why = "no positive values" if log else "all values are NaN or infinite"
        parts.append(f'<text x="{width / 2:.0f}" y="{HEIGHT / 2:.0f}" fill="{_TEXT}" text-anchor="middle">{why}</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{HEIGHT}" viewBox="0 0 {width} {HEIGHT}" '
        f'fill="none" font-family="system-ui,sans-serif" font-size="11">{"".join(parts)}</svg>'
    )


class _Box:
    """Where values lie in the picture."""

    def __init__(self, chart: Chart, width: int, log: bool) -> None:
        self.right, self.bottom, self.log = width - _RIGHT, HEIGHT - _BOTTOM, log
        self.steps = _range([line.x for line in chart.lines], 0.5)
        columns = [self.scaled(column) for line in chart.lines for column in (line.y, line.low, line.high)]
        low, high = _range(columns, 0.5 if log else 0.0)
        margin = (high - low) * 0.06
        self.values = 0.0 if not log and 0 <= low < (high - low) / 4 else low - margin, high + margin

    def scaled(self, values: Any) -> np.ndarray:
        """As it's on the axis: the decimal logarithm, or the value."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.log10(values) if self.log else np.asarray(values, float)

    def x(self, steps: Any) -> np.ndarray:
        low, high = self.steps
        return _LEFT + (np.asarray(steps) - low) / (high - low) * (self.right - _LEFT)

    def y(self, values: Any) -> np.ndarray:
        low, high = self.values
        return self.bottom - (self.scaled(values) - low) / (high - low) * (self.bottom - _TOP)


def _range(columns: list[np.ndarray], around: float) -> tuple[float, float]:
    """``around``: what's shown on both sides of a single value; 0 for a tenth of it."""
    values = np.concatenate(columns)
    values = np.clip(values[np.isfinite(values)], -_LARGEST, _LARGEST)
    low, high = (float(values.min()), float(values.max())) if len(values) else (0.0, 1.0)
    if high - low > max(_FLAT * max(abs(low), abs(high)), 1 / _LARGEST):
        return low, high
    around = max(around, abs(low) * 1e-9) if around else abs(low) * 0.1
    around = around if around > 1 / _LARGEST else 1.0
    return low - around, high + around


def _grid(box: _Box) -> Iterable[str]:
    across = numbers.ticks(*box.steps, whole=True)
    down = numbers.log_ticks(*box.values) if box.log else numbers.ticks(*box.values)
    names = [numbers.labels([value])[0] for value in down] if box.log else numbers.labels(down)
    xs, ys = box.x(across), box.y(down)
    lines = "".join(f"M{int(x)}.5 {_TOP}V{box.bottom}" for x in xs)  # on pixels
    lines += "".join(f"M{_LEFT} {int(y)}.5H{box.right}" for y in ys)
    yield f'<path d="{lines}" stroke="#808080" stroke-opacity=".25" shape-rendering="crispEdges"/>'
    for x, text in zip(xs, numbers.labels(across)):
        anchor = "end" if x > box.right - 12 else "middle"
        yield f'<text x="{x:.1f}" y="{HEIGHT - 6}" fill="{_TEXT}" text-anchor="{anchor}">{text}</text>'
    for y, text in zip(ys, names):
        yield f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" fill="{_TEXT}" text-anchor="end">{text}</text>'


def _curve(line: Line, box: _Box) -> Iterable[str]:
    x, y, smooth = box.x(line.x), box.y(line.y), line.smooth
    stroke = f'stroke="{line.color}" stroke-linejoin="round"'
    if line.ghost:
        yield f'<path d="{_path(x, y if smooth is None else box.y(smooth))}" {stroke} stroke-width="1.25"/>'
        return
    if (line.high > line.low).any():
        edge = _path(np.append(x, x[::-1]), box.y(np.append(line.high, line.low[::-1])))
        yield f'<path d="{edge}Z" fill="{line.color}" fill-opacity=".18"/>'
    if smooth is not None:
        yield f'<path d="{_path(x, y)}" {stroke} stroke-opacity=".35"/>'
        y = box.y(smooth)
    yield f'<path d="{_path(x, y)}" {stroke} stroke-width="2"/>'
    if line.dots:
        dots = "".join(f"M{a:.1f} {b:.1f}h0" for a, b in zip(x, y) if np.isfinite(b))
        yield f'<path d="{dots}" stroke="{line.color}" stroke-width="5" stroke-linecap="round"/>'


def _marks(chart: Chart, box: _Box) -> Iterable[str]:
    for i, (step, text, color) in enumerate(chart.marks):
        x = float(box.x(step))
        dx, anchor = (-4, "end") if x > (box.right + _LEFT) / 2 else (4, "start")
        yield f'<path d="M{x:.1f} {_TOP}V{box.bottom}" stroke="{color}" stroke-dasharray="4 3"/>'
        at = f'x="{x + dx:.1f}" y="{_TOP + 10 + 13 * (i % 3)}"'
        yield f'<text {at} fill="{color}" text-anchor="{anchor}">{escape(text)}</text>'


def _path(x: np.ndarray, y: np.ndarray) -> str:
    """The line through the finite points, in tenths of a pixel, each relative to the one before."""
    known = np.isfinite(y)
    points = np.rint(np.stack([x[known], y[known]], 1) * 10).astype(int)
    if not len(points):
        return ""
    moves = " ".join(f"{a:g} {b:g}" for a, b in (np.diff(points, axis=0) / 10).tolist())
    moves = _ZERO.sub(".", moves).replace(" -", "-")  # a quarter of the bytes
    return f"M{points[0, 0] / 10:g} {points[0, 1] / 10:g}{'l' * bool(moves)}{moves}"
