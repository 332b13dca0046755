"""The card of a run: a picture of 1200 x 630 pixels for sharing, with its last metrics and one or two curves."""

from __future__ import annotations

import base64
import math
import os
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from typing import Any

from nbddp.errors import NbddpError
from nbddp.history.history import History
from nbddp.panel import numbers, summary
from nbddp.panel.curves import BROKEN_COLOR, Charts, Family, charts
from nbddp.panel.picture import STATE_COLORS
from nbddp.panel.summary import plain
from nbddp.panel.svg import CHART_TOP, FONT, chart
from nbddp.panel.text import end_text
from nbddp.panel.view import Status
from nbddp.text import duration

WIDTH, HEIGHT = 1200, 630
_FRAME = "width:720px;max-width:100%;border:1px solid rgba(128,128,128,.4);border-radius:8px"  # in a notebook
_MARGIN = 60
_INNER = WIDTH - 2 * _MARGIN
_ACCENT = "#3b7df0"
_TITLE_Y, _FACTS_Y, _TILES_Y, _CHARTS_Y = 98, 138, 172, 302
_TITLE_SIZE = 46
_FACTS_SIZE, _LABEL_SIZE, _VALUE_SIZE, _KEY_SIZE = 21, 18, 42, 18
_SMALLER = 0.7  # a text that is too long gets smaller by this factor at most; then it is cut
_BOLD = 1.12  # as wide as the same text in the usual weight
_MARK_WIDTH = 180
_MAX_TILES = 4  # with metrics
_GAP = 48  # between two charts
_SCALE = 1.5  # of the charts, which are drawn for a smaller picture
_CHART_HEIGHT = 194 * _SCALE
_MAX_CHARTS = 2
_MAX_POINTS = 2_400
_MAX_LINES = 8
_NARROW, _WIDE = "iljtfrI1.,:;'|![]() ", "mwMW@%—"
_ELLIPSIS = "…"


@dataclass(frozen=True)
class _Theme:
    """The colours of a card."""

    page: str
    text: str
    soft: str
    line: str


_LIGHT = _Theme("#ffffff", "#16181d", "#5f6670", "#dfe2e7")
_DARK = _Theme("#14161b", "#f3f4f6", "#a0a7b1", "#343a44")


class Card:
    """A picture of a run as it was when the card was made; a notebook displays it.

    Attributes:
        svg: the picture as the text of an SVG file, 1200 x 630.
    """

    def __init__(self, history: History, status: Status, *, dark: bool = False) -> None:
        self._text = end_text(status, history)
        self.svg = _draw(history, status, _DARK if dark else _LIGHT)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the picture to a file whose name ends in ``.svg``, or in ``.png`` if cairosvg is installed.

        Raises:
            NbddpError: cairosvg is missing. ValueError: the name has another ending.
        """
        ending = os.path.splitext(path)[1].lower()
        if ending == ".png":
            data = _as_png(self.svg)
        elif ending == ".svg":
            data = self.svg.encode()
        else:
            raise ValueError(f"a card is saved as .svg or .png, not as {os.fspath(path)!r}")
        with open(path, "wb") as file:
            file.write(data)

    def __repr__(self) -> str:
        return f"<Card {self._text}>"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        source = f"data:image/svg+xml;base64,{base64.b64encode(self.svg.encode()).decode()}"
        image = f'<img src="{source}" alt="{escape(self._text)}" style="{_FRAME}">'
        return {"text/html": image, "text/plain": repr(self)}


def _as_png(svg: str) -> bytes:
    try:
        import cairosvg
    except (ImportError, OSError) as error:  # the second: without the library of its name
        raise NbddpError(
            f"a card is saved as .png with the package cairosvg, which cannot be imported here ({error}): "
            "save it as .svg, which any browser opens"
        ) from None
    png: bytes = cairosvg.svg2png(bytestring=svg.encode(), output_width=WIDTH, output_height=HEIGHT)
    return png


# ---------------------------------------------------------------------------- drawing


def _draw(history: History, status: Status, theme: _Theme) -> str:
    drawn = charts(history, _MAX_POINTS, _MAX_LINES)
    parts = [
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="{theme.page}"/>',
        f'<rect width="{WIDTH}" height="8" fill="{STATE_COLORS.get(status.state, _ACCENT)}"/>',
        *_heading(history, status, theme),
        *_tiles(history, status, theme),
        *_charts(drawn, theme),
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'font-family="{FONT}" fill="{theme.soft}">{"".join(parts)}</svg>'
    )


def _heading(history: History, status: Status, theme: _Theme) -> Iterable[str]:
    yield _text(status.name, _MARGIN, _TITLE_Y, _TITLE_SIZE, _INNER - _MARK_WIDTH, theme.text, bold=True)
    state = STATE_COLORS.get(status.state, _ACCENT)
    yield f'<circle cx="{_MARGIN + 8}" cy="{_FACTS_Y - 7}" r="8" fill="{state}"/>'
    yield _text(" · ".join(_facts(history, status)), _MARGIN + 28, _FACTS_Y, _FACTS_SIZE, _INNER - 28)
    yield from _mark(WIDTH - _MARGIN, _TITLE_Y, theme)


def _facts(history: History, status: Status) -> Iterable[str]:
    yield status.state.capitalize()
    yield status.summary
    device = status.ranks[0].device.partition(":")[0] if status.ranks else ""
    if device and device not in status.summary.split(" · "):
        yield device
    if rate := summary.progress(history).throughput:
        yield f"{rate:,.0f} samples/s"


def _mark(right: float, y: float, theme: _Theme) -> Iterable[str]:
    """The name of this package, with ranks that meet as its sign."""
    x = right - 130
    yield f'<g fill="none" stroke="{_ACCENT}" stroke-width="3" stroke-linecap="round">'
    yield "".join(f'<path d="M{x:g} {y - 6 + bend:g}q14 0 18 {-bend:g}"/>' for bend in (-9, -3, 3, 9))
    yield f'</g><circle cx="{x + 21:g}" cy="{y - 6:g}" r="5" fill="{_ACCENT}"/>'
    look = f'text-anchor="end" font-size="24" font-weight="700" fill="{theme.soft}"'
    yield f'<text x="{right}" y="{y}" {look}>nbddp</text>'


def _tiles(history: History, status: Status, theme: _Theme) -> Iterable[str]:
    tiles = [(summary.describe(name).tile, value) for name, value in _chosen(history.latest())[:_MAX_TILES]]
    shown = [(label, numbers.metric(value), math.isfinite(value)) for label, value in tiles]
    if not shown:
        shown.append(("Ranks", f"{len(status.ranks):,}", True))
    shown.append(("Time", duration(status.seconds), True))
    width = _INNER / max(len(shown), 3)
    for i, (label, value, finite) in enumerate(shown):
        x = _MARGIN + i * width
        if i:
            yield f'<path d="M{x - 24:g} {_TILES_Y}v80" stroke="{theme.line}" stroke-width="2"/>'
        yield _text(label, x, _TILES_Y + 19, _LABEL_SIZE, width - 44)
        color = theme.text if finite else BROKEN_COLOR
        yield _text(value, x, _TILES_Y + 72, _VALUE_SIZE, width - 44, color, bold=True)


def _chosen(latest: dict[str, float]) -> list[tuple[str, float]]:
    """One metric of each family first, of later families the validation metric, as in the panel."""
    families: dict[str, list[str]] = {}
    for name in latest:
        families.setdefault(summary.describe(name).family, []).append(name)
    heads = []
    for i, names in enumerate(families.values()):
        validation = (name for name in names if i and summary.describe(name).label.lower().startswith("val"))
        heads.append(next(validation, names[0]))
    return [(name, latest[name]) for name in [*heads, *(name for name in latest if name not in heads)]]


def _charts(drawn: Charts, theme: _Theme) -> Iterable[str]:
    families = drawn.families[:_MAX_CHARTS]
    if not families:
        height = HEIGHT - _CHARTS_Y - 48
        yield f'<rect x="{_MARGIN}" y="{_CHARTS_Y}" width="{_INNER}" height="{height}" rx="12" fill="none" '
        yield f'stroke="{theme.line}" stroke-width="2" stroke-dasharray="8 8"/>'
        middle = _CHARTS_Y + height / 2 + 8
        yield f'<text x="{WIDTH / 2}" y="{middle:g}" text-anchor="middle" font-size="24">no metric was logged</text>'
    width = (_INNER - _GAP * (len(families) - 1)) / max(1, len(families))
    for i, family in enumerate(families):
        x = _MARGIN + i * (width + _GAP)
        yield from _legend(family, x, _CHARTS_Y, width, theme)
        lines = chart(family, drawn.marks, 0, CHART_TOP, width / _SCALE)
        where = f"translate({x:g} {HEIGHT - 24 - _CHART_HEIGHT:g}) scale({_SCALE})"
        yield f'<g transform="{where}" font-size="11">{"".join(lines)}</g>'


def _legend(family: Family, x: float, y: float, width: float, theme: _Theme) -> Iterable[str]:
    """The chart's title, and as many keys as fit beside it."""
    title = _cut(family.lines[0].metric.title, (_KEY_SIZE + 2) * _BOLD, width / 2)
    yield _text(title, x, y, _KEY_SIZE + 2, width, theme.text, bold=True)
    at = x + _text_width(title, (_KEY_SIZE + 2) * _BOLD) + 24
    for line in family.lines:
        alone = len(family.lines) == 1 and line.metric.label.lower() == line.metric.family
        label = f"{'' if alone else plain(line.metric.label) + ' '}{numbers.metric(line.last)}"
        left = x + width - at - 30
        if left < min(80, _text_width(label, _KEY_SIZE)):
            return
        label = _cut(label, _KEY_SIZE, left)
        color = theme.soft if math.isfinite(line.last) else BROKEN_COLOR
        yield f'<path d="M{at:g} {y - 6:g}h20" stroke="{line.color}" stroke-width="4" stroke-linecap="round"/>'
        yield _text(label, at + 30, y, _KEY_SIZE, left + 1, color)
        at += 30 + _text_width(label, _KEY_SIZE) + 26


def _text(text: str, x: float, y: float, size: float, width: float, color: str = "", *, bold: bool = False) -> str:
    """One line of text that is not wider than ``width``: smaller if it is too long, and cut if it is still too long."""
    text, wide = plain(text), _BOLD if bold else 1.0
    size *= max(_SMALLER, min(1.0, width / max(1.0, _text_width(text, size * wide))))
    look = (f' fill="{color}"' if color else "") + (' font-weight="700"' if bold else "")
    shown = escape(_cut(text, size * wide, width))
    return f'<text x="{x:g}" y="{y:g}" font-size="{size:.4g}"{look}>{shown}</text>'


def _cut(text: str, size: float, width: float) -> str:
    """As much of the text as is not wider than ``width``."""
    text = plain(text)
    if _text_width(text, size) <= width:
        return text
    while text and _text_width(text + _ELLIPSIS, size) > width:
        text = text[:-1]
    return text.rstrip() + _ELLIPSIS


def _text_width(text: str, size: float) -> float:
    """About the width of the text in pixels, rather too much."""
    return size * sum(map(_em, text))


def _em(char: str) -> float:
    if unicodedata.east_asian_width(char) in "WF":
        return 1.05
    if char in _NARROW:
        return 0.38
    return 0.95 if char in _WIDE else 0.74 if char.isupper() else 0.62
