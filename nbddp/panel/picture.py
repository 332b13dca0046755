"""The picture that is saved in the notebook: curves as SVG and the last state as HTML, both without scripts."""

from __future__ import annotations

import base64
import math
import re
import time
from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from nbddp.history.history import History
from nbddp.panel import figures, numbers, ranks, summary
from nbddp.panel.curves import (
    BROKEN_COLOR,
    MARK_COLOR,
    MAX_LINES,
    MAX_POINTS,
    Charts,
    Family,
    Line,
    charts,
    mark_color,
    shown_marks,
)
from nbddp.panel.summary import plain
from nbddp.panel.svg import STRETCHED_HEIGHT, Stretched, draw, draw_each
from nbddp.panel.text import end_text
from nbddp.panel.view import Status, Viewable
from nbddp.text import fold

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MAX_SVG_BYTES = 64_000  # the notebook file holds the SVG as base64, with tables beside it: 100 kB in all
_LEAST_POINT_BYTES = 8  # of the SVG
_MAX_FIGURE_BYTES = 200_000  # of what the ranks have shown, as base64
MAX_ROWS = 40  # in a table
NAME_CHARS = 60
_LOG_LINES = 12
_HANG_CHARS = 6_000
_LINE_CHARS = 300
_COLOR_CODES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")

_COLOR = "#3b7df0"
_MAX_TILES = 5  # with metrics
_CARD = "max-width:744px;padding:10px 14px;border:1px solid rgba(128,128,128,.4);border-radius:8px"
_TILES = "margin:8px 0 4px;overflow:hidden"
_TILE = "display:inline-block;margin:0 12px 6px 0;padding-left:12px;border-left:1px solid rgba(128,128,128,.4)"
_LABEL = "font-size:.85em;opacity:.75"
_NUMBER = "font-size:1.25em"
_CHARTS = "display:flex;flex-wrap:wrap;gap:8px 20px"  # as many columns of at least 300 px as there is space for
_CHART = "flex:1 1 300px;min-width:0"
_TABLE = "display:inline-block;vertical-align:top;max-width:100%;margin:4px 32px 0 0;overflow-x:auto"
_MAX_KEYS = 8  # in a legend
STATE_COLORS = {"finished": "#22994f", "failed": "#d9453d", "stopped": "#b07a10"}


class Picture:
    """A history's curves, one chart per family of metrics; with a status also how the run ended, in words.

    A notebook displays it. ``svg`` is the image as text, ``figure()`` the same charts with matplotlib.

    Args:
        source: the run, for the last output of a rank that failed.
        names: the metrics to draw; () for all.
        log: use a logarithmic axis for the values.
        max_bytes: of the SVG; curves that are larger get fewer points.
        figure_bytes: of what the ranks have shown, as base64; images that are larger are scaled down.
    """

    def __init__(
        self,
        history: History,
        status: Status | None = None,
        source: Viewable | None = None,
        *,
        names: Sequence[str] = (),
        log: bool = False,
        max_bytes: int = _MAX_SVG_BYTES,
        figure_bytes: int = _MAX_FIGURE_BYTES,
    ) -> None:
        self._max_bytes = max_bytes
        self._figure_bytes = figure_bytes
        self._names = names
        self._log = log
        self._history = history
        self._status = status
        self._source = source

    @property
    def svg(self) -> str:
        """The charts as an SVG document, readable on light and dark; at most ``max_bytes``."""
        return self._within(self._max_bytes, lambda drawn: [draw(drawn)])[0]

    def _drawn(self, points: int, lines: int) -> Charts:
        return charts(self._history, points, lines, self._names, log=self._log)

    def _metrics(self) -> Iterable[str]:
        return _metrics_table(self._history)

    def _within(self, limit: int, drawing: Callable[[Charts], list[str]]) -> list[str]:
        """What ``drawing`` makes of as many points and lines as fit into ``limit`` bytes."""
        points, lines = min(MAX_POINTS, self._max_bytes // _LEAST_POINT_BYTES), MAX_LINES
        while True:
            texts = drawing(self._drawn(points, lines))
            size = sum(len(text.encode()) for text in texts)
            if size <= limit or lines == 1:
                return texts
            # Fewer points first; then, when each line has the minimum, fewer lines.
            points, lines = (int(points * 0.95 * limit / size), lines) if points > 100 else (points, lines // 2)

    def _repr_mimebundle_(self, **_options: Any) -> dict[str, str]:
        return self.bundle()

    def __repr__(self) -> str:
        if self._status is None:
            return f"Picture({self._history!r})"
        return end_text(self._status, self._history)

    def bundle(self, name: str = "") -> dict[str, str]:
        """The data for ``display(..., raw=True)``: HTML without scripts, and plain text.

        Args:
            name: an additional CSS class of the outer element.
        """
        parts = [*self._heading(), *self._tiles(), *self._hang(), *self._charts(), *self._figures(), *self._metrics()]
        parts += [*(self._hosts_table() or self._ranks_table()), *self._last_output()]
        html = f'<div class="{f"nbddp-picture {name}".strip()}" style="{_CARD}">{"".join(parts)}</div>'
        return {"text/html": html, "text/plain": repr(self)}

    def figure(self, *, width: float = 9.0) -> Figure:
        """The same charts as a matplotlib figure, ``width`` inches wide. Needs matplotlib."""
        from matplotlib.figure import Figure

        drawn = self._drawn(MAX_POINTS, MAX_LINES)
        columns = min(2, max(1, len(drawn.families)))
        rows = max(1, math.ceil(len(drawn.families) / columns))
        figure = Figure(figsize=(width, rows * width / columns * 0.62), layout="constrained")
        for i, family in enumerate(drawn.families):
            axes = figure.add_subplot(rows, columns, i + 1)
            _plot(axes, family, drawn.marks)
        if drawn.note:
            figure.supxlabel(drawn.note, fontsize="small", parse_math=False)
        return figure

    def _heading(self) -> Iterable[str]:
        status = self._status
        if status is None:
            return
        color = STATE_COLORS.get(status.state, _COLOR)
        rate = summary.progress(self._history).throughput
        throughput = f"{rate:,.0f} samples/s" if rate else ""
        facts = (plain(status.summary), _clock(status.seconds), throughput, summary.restart_count(status))
        yield (
            f'<p><span style="color:{color}">●</span> <b>{escape(status.state.capitalize())}</b> &nbsp;'
            f"<b>{escape(plain(status.name[:_LINE_CHARS]))}</b> &nbsp;"
            f"{escape(' · '.join(filter(None, facts)))}</p>"
        )
        if status.restarts:
            yield _notice("↻", MARK_COLOR, summary.restart_text(status))
        for text in summary.notices(self._history):
            yield _notice("▲", MARK_COLOR, text)
        if status.error:
            yield _notice("●", color, plain(status.error))
            yield from (_failing_name(name, text) for name, text in status.failing_names)
        if status.remark:
            yield f"<p>{escape(plain(status.remark[:_LINE_CHARS]))}</p>"

    def _tiles(self) -> Iterable[str]:
        """The panel's row of tiles: steps, epochs, the newest values, samples per second."""
        if self._status is None:
            return
        now = summary.progress(self._history, over=self._status.over)
        loops = [(now.step_label, now.step, now.steps), (now.outer_label, now.outer, now.outers)]
        tiles = [
            (label, f"{done:,}" + (f" of {total:,}" if total else ""))
            for label, done, total in loops
            if done is not None
        ]
        latest = list(self._history.latest().items())[:_MAX_TILES]
        tiles += [(summary.describe(name).tile[:NAME_CHARS], numbers.metric(value)) for name, value in latest]
        if now.throughput:
            tiles.append(("Throughput", f"{now.throughput:,.0f} samples/s"))
        if tiles:
            cells = (
                f'<div style="{_TILE}"><div style="{_LABEL}">{escape(label)}</div><b style="{_NUMBER}">{text}</b></div>'
                for label, text in tiles
            )
            # The borders left of a row's first tile are cut off, wherever the rows are broken.
            yield f'<div style="{_TILES}"><div style="margin-left:-13px">{"".join(cells)}</div></div>'

    def _hang(self) -> Iterable[str]:
        """Where the ranks were, if the run hung when it ended."""
        lines = summary.hang_lines(self._status, _HANG_CHARS) if self._status else []
        if lines:
            first, *rest = lines
            sign = f'<span style="color:{MARK_COLOR}">▲</span>'
            yield f"<details open><summary>{sign} <b>{escape(first[:_LINE_CHARS])}</b></summary>"
            yield f"<pre>{escape(chr(10).join(rest))}</pre></details>"

    def _charts(self) -> list[str]:
        """Each chart with its title and legend, which are the page's text: the browser lays them out."""
        return self._within(self._max_bytes * 4 // 3, _charts_html)  # in base64, three bytes are four

    def _figures(self) -> Iterable[str]:
        blocks = "".join(figures.html(self._history.figures, self._figure_bytes)) if self._status else ""
        if blocks:
            yield f"<div>{blocks}</div>"  # or the tables stand beside it

    def _ranks_table(self) -> Iterable[str]:
        rows = ranks.rows(self._status, self._history, time.time()) if self._status else []
        if not rows:
            return
        yield table_head("Rank", "Device", "State", "Step")
        for row in rows[:MAX_ROWS]:
            step = "–" if row.step is None else f"{row.step:,}"
            yield table_row(str(row.rank), escape(row.device), _state(row.state), step)
        yield table_end(4, len(rows) - MAX_ROWS)

    def _hosts_table(self) -> list[str]:
        return list(self._host_rows())

    def _host_rows(self) -> Iterable[str]:
        hosts = ranks.hosts(ranks.rows(self._status, self._history, time.time())) if self._status else []
        if not hosts:
            return
        yield table_head("Host", "Ranks", "State", "Step")
        if len(hosts) > MAX_ROWS:
            hosts = sorted(hosts, key=lambda host: host.state != "failed")  # a host that failed must not be cut off
        for host in hosts[:MAX_ROWS]:
            first, last = host.ranks[0], host.ranks[-1]  # the numbers of a host's ranks are consecutive
            step = "–" if host.step is None else f"{host.step:,}"
            where = str(first) if first == last else f"{first} to {last}"
            yield table_row(escape(host.name), where, _state(host.state), step)
        yield table_end(4, len(hosts) - MAX_ROWS)

    def _last_output(self) -> Iterable[str]:
        """The last lines that the failed rank printed."""
        status, source = self._status, self._source
        if status is None or source is None or status.failed_rank is None:
            return
        text, _, _ = source.output(status.failed_rank, 0, 128 << 10)
        lines = [line[:_LINE_CHARS] for line in fold(text).rstrip("\n").split("\n")[-_LOG_LINES:] if line]
        if lines:
            rank = ranks.on_host(status, status.failed_rank) or f"rank {status.failed_rank}"
            yield f"<details open><summary>Last output of {escape(rank)}</summary>"
            uncolored = (_COLOR_CODES.sub("", line) for line in lines)
            shown = ("".join(c for c in line if c == "\t" or c.isprintable()) for line in uncolored)
            yield f"<pre>{escape(chr(10).join(shown))}</pre></details>"


def plotted(history: History, names: Sequence[str], log: bool) -> Picture:
    """The implementation of ``History.plot``."""
    return Picture(history, names=names, log=log)


def _clock(seconds: float) -> str:
    """``00:38`` or ``2:03:04``, as in the live panel."""
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute:02}:{second:02}"


def _charts_html(drawn: Charts) -> list[str]:
    found = [_chart_html(family, chart) for family, chart in zip(drawn.families, draw_each(drawn))]
    note = [f"<p>{escape(drawn.note)}</p>"] if drawn.note else []
    return [f'<div style="{_CHARTS}">', *found, "</div>", *note] if found else note


def _chart_html(family: Family, chart: Stretched) -> str:
    """A chart that is as wide as its column. Its text has the same size at every width."""
    title = family.lines[0].metric.title[:NAME_CHARS]
    labels = ", ".join(line.metric.label[:NAME_CHARS] for line in family.lines[:_MAX_KEYS])
    curves = _image(chart.curves, f"Chart of {title}: {labels}", "100%", "0")
    axis = _image(chart.axis, "", f"{chart.left}px", f"0 0 0 -{chart.left}px")  # in the padding, beside the curves
    images = f'<div style="padding-left:{chart.left}px">{axis}{curves}</div>'
    return f'<div style="{_CHART}"><div><b>{escape(title)}</b>{_legend(family)}</div>{images}</div>'


def _image(svg: str, alt: str, width: str, margin: str) -> str:
    """Where the page drops styles, the image has its own size."""
    data = base64.b64encode(svg.encode()).decode()
    style = f"width:{width};height:{STRETCHED_HEIGHT}px;margin:{margin};vertical-align:top"
    return f'<img src="data:image/svg+xml;base64,{data}" alt="{escape(plain(alt))}" style="{style}">'


def _legend(family: Family) -> str:
    alone = len(family.lines) == 1 and family.lines[0].metric.label.lower() == family.lines[0].metric.family
    keys = [_key(line, "" if alone else line.metric.label[:NAME_CHARS]) for line in family.lines[:_MAX_KEYS]]
    rest = family.undrawn + len(family.lines) - len(keys)
    return "".join([*keys, f" &nbsp; and {rest:,} more" if rest else ""])


def _key(line: Line, label: str) -> str:
    """A line's key, which is not broken into two lines."""
    sign = f'<span style="color:{line.color}">━</span>'
    return f'<span style="display:inline-block;margin-left:12px">{sign} {escape(label)} {value(line.last)}</span>'


def _metrics_table(history: History) -> Iterable[str]:
    named = [(name, history[name]) for name in history.names]
    named = [(name, series) for name, series in named if len(series.steps)]
    if not named:
        return
    yield table_head("Metric", "Last", "Lowest", "Highest")
    for name, (_, values) in named[:MAX_ROWS]:
        finite = values[np.isfinite(values)]
        low, high = (value(float(finite.min())), value(float(finite.max()))) if len(finite) else ("–", "–")
        yield table_row(escape(plain(name[:NAME_CHARS])), value(float(values[-1])), low, high)
    yield table_end(4, len(named) - MAX_ROWS)


def _notice(sign: str, color: str, text: str) -> str:
    """A line with a coloured sign; the text has the page's own colour, which can be read in every theme."""
    return f'<p><span style="color:{color}">{sign}</span> {escape(text[:_LINE_CHARS])}</p>'


def _failing_name(name: str, text: str) -> str:
    described = f"{escape(plain(name))}&nbsp; {escape(plain(text[:_LINE_CHARS]))}"
    return f'<p style="margin:0 0 0 1.2em"><code style="background:none">{described}</code></p>'


def _state(state: str) -> str:
    return f'<span style="color:{STATE_COLORS.get(state, _COLOR)}">●</span> {escape(state)}'


def value(value: float) -> str:
    text = numbers.metric(value)
    text = f'<span style="white-space:nowrap">{text}</span>' if "e-" in text else text
    return text if math.isfinite(value) else f'<span style="color:{BROKEN_COLOR}">▲</span> <b>{text}</b>'


def table_head(*headings: str) -> str:
    """A table begins: beside the one before where both fit, and with a scroll bar where it is too wide itself."""
    cells = "".join(f"<th>{text}</th>" for text in headings)
    return f'<div style="{_TABLE}"><table><thead><tr>{cells}</tr></thead><tbody>'


def table_row(*cells: str) -> str:
    """A row of cells that are HTML already."""
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def table_end(columns: int, rest: int) -> str:
    more = f'<tr><td colspan="{columns}">and {rest:,} more</td></tr>' if rest > 0 else ""
    return f"{more}</tbody></table></div>"


def _plot(axes: Any, family: Family, marks: list[summary.Mark]) -> None:
    lines, shown = family.lines, (lambda values: np.power(10.0, values)) if family.log else np.asarray
    for line in lines:
        steps, values = line.series.steps, shown(line.series.values)
        options = {"color": line.color, "label": line.metric.label}
        if line.mean is None:
            axes.plot(steps, values, marker="o" if line.sparse else None, markersize=3, **options)
        else:
            axes.plot(steps, values, color=line.color, alpha=0.3, linewidth=0.8)
            axes.plot(steps, shown(line.mean), **options)
        if len(line.spread.steps):
            low, high = shown(line.spread.low), shown(line.spread.high)
            axes.fill_between(line.spread.steps, low, high, color=line.color, alpha=0.18)
    for mark in shown_marks(family, marks):
        color = mark_color(mark)
        axes.axvline(mark.step, color=color, linestyle="--", linewidth=1)
        place = {"xy": (mark.step, 1), "xycoords": ("data", "axes fraction"), "textcoords": "offset points"}
        axes.annotate(mark.label, xytext=(4, -10), color=color, fontsize="small", **place)
    axes.set_title(lines[0].metric.title, loc="left", parse_math=False)
    axes.set_xlabel("step")
    if family.log:
        axes.set_yscale("log")
    axes.grid(alpha=0.25)
    for text in axes.legend(frameon=False).get_texts():
        text.set_parse_math(False)  # a $ in a name does not start a formula
