"""A run as HTML: what the live panel shows around its charts, and the picture in a saved notebook, in one look."""

from __future__ import annotations

import base64
import time
from html import escape

from nbddp.history.history import History
from nbddp.history.progress import RankProgress
from nbddp.panel import numbers, svg
from nbddp.panel.charts import AMBER, RED, Chart, charts, described, tile_label
from nbddp.panel.run_progress import Progress, progress
from nbddp.panel.status import RankStatus, Status
from nbddp.panel.text_view import restarted

_COLORS = {"finished": "#22994f", "failed": RED, "stopped": AMBER, "starting": AMBER}
_BLUE = "#3b7df0"
_LINE = "rgba(128,128,128,.3)"
_SOFT = "opacity:.65"
_SMALL = f"font-size:11px;{_SOFT}"
_CARD = f"max-width:744px;padding:10px 14px;border:1px solid {_LINE};border-radius:8px"
_TILE = (
    "display:inline-block;vertical-align:top;min-width:74px;margin:0 12px 8px 0;padding-left:12px;"
    f"border-left:1px solid {_LINE}"
)
_MAX_TILES, _MAX_ROWS = 6, 32
_COLUMNS = {"Rank": 8, "Device": 13, "State": 30, "Step": 11, "Step time": 13, "Memory": 25}  # widths in percent


def parts(history: History, status: Status) -> dict[str, str]:
    """The pieces of a panel by name, each replaced in the page only when it has changed."""
    now = progress(history)
    return {
        "head": _head(status),
        "bar": _bar(now.fraction, _color(status.state)),
        "notes": "".join(_note(sign, color, text) for sign, color, text in _notes(history, status)),
        "tiles": _tiles(history, status, now),
        "table": _table(history, status),
    }


def caption(chart: Chart) -> str:
    """A chart's title and legend."""
    lines = [line for line in chart.lines if not line.ghost]
    keys = [
        _key(line.color, "" if len(lines) == 1 else line.label or "all", numbers.metric(line.last)) for line in lines
    ]
    keys += [_key(line.color, "before", "") for line in chart.lines[:1] if line.ghost]
    more = f' <span style="{_SOFT}">and {chart.left_out} more</span>' if chart.left_out else ""
    return f"<b>{escape(chart.title)}</b>{''.join(keys)}{more}"


def picture(history: History, status: Status, before: History | None = None, *, name: str = "") -> str:
    """The whole run without scripts: at most about 100 kB, whatever was logged."""
    shown, _ = charts(history, before, points=300)
    width = 708 if len(shown) == 1 else 350
    pieces = parts(history, status)
    pieces["tiles"] += "".join(_image(chart, width) for chart in shown[:6])
    return f'<div class="nbddp-picture {name}" style="{_CARD}">{"".join(pieces.values())}</div>'


def _image(chart: Chart, width: int) -> str:
    data = base64.b64encode(svg.draw(chart, width).encode()).decode()
    alt = escape(f"{chart.title}: " + ", ".join(f"{line.label} {numbers.metric(line.last)}" for line in chart.lines))
    image = f'<img src="data:image/svg+xml;base64,{data}" alt="{alt}" style="display:block;width:100%;margin:2px 0 0">'
    share = "100%" if width > 400 else "49%"  # smaller where the page is narrow; one above the other on a phone
    box = f"display:inline-block;vertical-align:top;width:{share};min-width:270px;margin:0 1% 8px 0"
    return f'<div style="{box}">{caption(chart)}{image}</div>'


def _color(state: str) -> str:
    return _COLORS.get(state, _BLUE)


def _head(status: Status) -> str:
    color = _color(status.state)
    chip = f"display:inline-block;padding:2px 12px 2px 10px;border-radius:99px;font-weight:600;color:{color}"
    chip += f";{_tint(color)}"
    return (
        f'<span style="{chip}">{_dot(color)}{status.state.capitalize()}</span> &nbsp;'
        f'<b style="font-size:14px">{escape(status.name)}</b> &nbsp;'
        f'<span style="{_SOFT}">{escape(status.summary)} · {numbers.clock(status.seconds)}</span>'
    )


def _tint(color: str) -> str:
    return f"background:rgba({','.join(str(int(color[i : i + 2], 16)) for i in (1, 3, 5))},.13)"


def _dot(color: str) -> str:
    look = f"display:inline-block;width:8px;height:8px;margin:0 8px 0 0;border-radius:50%;background:{color}"
    return f'<span class="nbddp-dot" style="{look}"></span>'


def _bar(fraction: float | None, color: str) -> str:
    width = f"{100 * (1.0 if fraction is None else fraction):.1f}%"
    fill = f"height:4px;border-radius:2px;width:{width};background:{color}" + (
        ";opacity:.3" if fraction is None else ""
    )
    track = "height:4px;border-radius:2px;margin:8px 0 10px;background:rgba(128,128,128,.2)"
    return f'<div style="{track}"><div style="{fill}"></div></div>'


def _notes(history: History, status: Status) -> list[tuple[str, str, str]]:
    notes = []
    if status.restarts:
        notes.append(("↻", AMBER, restarted(status, history)))
    if status.hang:
        notes.append(("▲", AMBER, status.hang.partition("\n")[0]))
    if status.error:
        notes.append(("●", RED, status.error))
    if status.remark:
        notes.append(("", "", status.remark))
    return notes


def _note(sign: str, color: str, text: str) -> str:
    if not sign:
        return f'<div style="margin:0 0 8px;{_SOFT}">{escape(text)}</div>'
    box = f"margin:0 0 10px;padding:7px 11px;border-left:3px solid {color};border-radius:6px;{_tint(color)}"
    return f'<div style="{box}"><span style="color:{color}">{sign}</span> {escape(text)}</div>'


def _tiles(history: History, status: Status, now: Progress) -> str:
    counts = [("Step", now.step, now.steps)] if now.step is not None else []
    tiles = [(name, f"{n:,}", f"of {total:,}" if total else "") for name, n, total in counts + now.loops]
    last = [("Throughput", f"{now.throughput:,.0f}", "samples/s")] if now.throughput else []
    last += [("Time left", numbers.clock(now.left), "")] if now.left is not None and not status.over else []
    latest = history.latest()
    for name in _newest(latest)[: _MAX_TILES - len(tiles) - len(last)]:
        tiles.append((tile_label(name), numbers.metric(latest[name]), ""))
    tiles += last
    cells = "".join(
        f'<div style="{_TILE}"><div style="{_SMALL}">{escape(label)}</div><b style="font-size:18px">{value}</b> '
        f'<span style="{_SMALL}">{unit}</span></div>'
        for label, value, unit in tiles
    )
    # The borders left of a row's first tile are cut off, wherever the rows are broken.
    return f'<div style="overflow:hidden"><div style="margin-left:-13px">{cells}</div></div>' if tiles else ""


def _newest(latest: dict[str, float]) -> list[str]:
    """The metrics in the order of the tiles: of each chart one, of later charts the validation metric."""
    families: dict[str, list[str]] = {}
    for name in latest:
        families.setdefault(described(name)[0], []).append(name)
    first = [
        next((n for n in names if i and "val" in n.lower()), names[0]) for i, names in enumerate(families.values())
    ]
    return [*first, *(name for name in latest if name not in first)]


def _key(color: str, label: str, value: str) -> str:
    red = f"color:{RED};font-weight:700" if value in ("NaN", "∞", "−∞") else ""
    text = f'{escape(label)} <span data-value style="{red}">{value}</span>'
    return f'<span style="display:inline-block;margin-left:12px"><span style="color:{color}">━</span> {text}</span>'


def _table(history: History, status: Status) -> str:
    times = sorted(rank.step_seconds for rank in history.ranks if rank.step_seconds)
    usual = times[len(times) // 2] if times else None
    rows = "".join(_row(each, history.ranks[each.rank], usual) for each in status.ranks[:_MAX_ROWS])
    cell = f"text-align:left;font-weight:400;padding:3px 12px 3px 2px;border-bottom:1px solid {_LINE}"
    heads = "".join(
        f'<th style="width:{width}%;{cell}"><span style="{_SMALL}">{name}</span></th>'
        for name, width in _COLUMNS.items()
    )
    rest = len(status.ranks) - _MAX_ROWS
    more = f'<tr><td colspan="6">and {rest} more</td></tr>' if rest > 0 else ""
    style = "width:100%;font-size:13px;white-space:nowrap;border-collapse:collapse"
    return f'<table style="{style}"><tr>{heads}</tr>{rows}{more}</table>' if rows else ""


def _row(rank: RankStatus, done: RankProgress, usual: float | None) -> str:
    silent = time.time() - (done.arrived_at or done.advanced_at or time.time())
    slow = usual and done.step_seconds and done.step_seconds > 1.5 * usual
    note = f"silent for {silent:.0f} s" if silent > max(5, 10 * (done.step_seconds or 0)) else "slow" if slow else ""
    note = (f"waits {rank.waits}" if rank.waits else note) if rank.state == "running" else ""
    color = AMBER if note else _COLORS.get(rank.state, "#22994f")
    pill = f' <span style="{_SMALL};color:{AMBER}">{escape(note)}</span>' if note else ""
    memory = numbers.size(rank.resident) if rank.resident else ""
    if rank.gpu is not None:
        used, total = rank.gpu
        bar = "height:5px;border-radius:3px"
        share = f'<div style="width:{48 * used / total:.0f}px;{bar};background:#888"></div>'
        track = f"display:inline-block;width:48px;{bar};background:rgba(128,128,128,.25)"
        gauge = f'<div style="{track}">{share}</div>'
        memory = f"{gauge} &nbsp;{used / 2**30:.1f} / {total / 2**30:.0f} GB"
    step_time = (
        "–"
        if not done.step_seconds
        else f"{done.step_seconds * 1000:.1f} ms"
        if done.step_seconds < 1
        else f"{done.step_seconds:.1f} s"
    )
    cells = (
        str(rank.rank),
        escape(" · ".join(filter(None, [rank.host, rank.device]))),
        f"{_dot(color)}{rank.state}{pill}",
        f"{done.step:,}" if done.step >= 0 else "–",
        step_time,
        memory,
    )
    return (
        "<tr>"
        + "".join(f'<td style="text-align:left;padding:3px 12px 3px 2px">{cell}</td>' for cell in cells)
        + "</tr>"
    )
