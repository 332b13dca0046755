"""A run as HTML: what the live panel shows around its charts, and the picture in a saved notebook, in one look."""

import base64
from collections.abc import Callable, Iterable, Sequence
from html import escape

from nbddp.history.history import History
from nbddp.history.progress import RankProgress
from nbddp.panel import numbers, svg
from nbddp.panel.charts import AMBER, GRAY, RED, Chart, capital, charts, described, tile_label
from nbddp.panel.run_progress import Progress, lagging, notices, progress
from nbddp.panel.status import RankStatus, Status
from nbddp.panel.text_view import restarted
from nbddp.text import LINE_CHARS, clock, cut, duration, plain

_COLORS = {"starting": GRAY, "running": "#3b7df0", "finished": "#22994f", "failed": RED, "stopped": AMBER}
_LINE = "rgba(128,128,128,.3)"
_SOFT = "opacity:.65"
_SMALL = f"font-size:11px;{_SOFT}"
_CARD = f"max-width:744px;font-size:13px;line-height:1.4;padding:10px 14px;border:1px solid {_LINE};border-radius:8px"
_TILE = (
    "display:inline-block;vertical-align:top;min-width:68px;margin:0 9px 8px 0;padding-left:10px;"
    f"border-left:1px solid {_LINE}"
)
_CELL = "text-align:left;padding:3px 12px 3px 2px"
_PRE = "margin:4px 0 8px;font-size:12px;white-space:pre-wrap;overflow-wrap:anywhere"
_MAX_TILES = 6
_FIRST_ROWS, _MAX_ROWS = 8, 24  # of the table: seen at once, and in all
_COLUMNS = {"Rank": 8, "Device": 13, "State": 30, "Step": 11, "Step time": 13, "Memory": 25}  # widths in percent
_PICTURE_CHARTS = 6
_PICTURE_POINTS, _LEAST_POINTS = 1_400, 24  # of all lines, of a line
_IMAGES_BYTES = 70_000  # a picture has at most 100 kB
_STACKS_CHARS, _OUTPUT_LINES, _OUTPUT_CHARS = 6_000, 12, 128 << 10


def parts(history: History, status: Status) -> dict[str, str]:
    """The pieces of a panel by name, each replaced in the page only when it has changed."""
    now = progress(history)
    return {
        "head": _head(status),
        "bar": _bar(now.fraction, status.state),
        "notes": "".join(_notes(history, status)),
        "tiles": _tiles(history, status, now),
        "table": _table(history, status),
    }


def caption(chart: Chart) -> str:
    """A chart's title and legend."""
    own = chart.own
    keys = [_key(line.color, "" if len(own) == 1 else line.label or "all", numbers.metric(line.last)) for line in own]
    keys += [_key(GRAY, "earlier run", "")] if len(own) < len(chart.lines) else []
    more = f' <span style="{_SOFT}">and {chart.left_out} more</span>' if chart.left_out else ""
    return f"<b>{escape(cut(chart.title))}</b>{''.join(keys)}{more}"


def picture(
    history: History,
    status: Status,
    before: History | None = None,
    *,
    name: str = "",
    points: int = 300,
    tail: Callable[[int, int], str] = lambda rank, chars: "",
) -> str:
    """The whole run without scripts: at most about 100 kB, whatever was logged.

    Args:
        before: an earlier run, in gray.
        name: another class of it.
        points: of a line at most.
        tail: returns the end of what a rank has printed: rank, characters.
    """
    pieces = parts(history, status)
    pieces["tiles"] += _charts(history, (), before, points=points, log=False)
    return _card("".join(pieces.values()) + _last_output(status, tail), name)


def plot(history: History, names: Sequence[str] = (), *, log: bool = False, before: History | None = None) -> str:
    """A card with the charts of these metrics, or of all; ``log``: with a logarithmic axis for the values."""
    return _card(_charts(history, names, before, points=300, log=log))


def _card(content: str, name: str = "") -> str:
    return f'<div class="{f"nbddp-picture {name}".strip()}" style="{_CARD}">{content}</div>'


def _charts(history: History, names: Sequence[str], before: History | None, *, points: int, log: bool) -> str:
    points = min(points, _PICTURE_POINTS // max(1, min(48, len(names or history))))
    most = max(_PICTURE_CHARTS, len(names))
    while True:
        shown, rest = charts(history, before, names, max(_LEAST_POINTS, points), most)
        images = "".join(_image(chart, 708 if len(shown) == 1 else 350, log=log) for chart in shown)
        if len(images) <= _IMAGES_BYTES or points <= _LEAST_POINTS:
            return images + _note("", "", rest)
        points = int(points * 0.9 * _IMAGES_BYTES / len(images))


def _image(chart: Chart, width: int, *, log: bool) -> str:
    data = base64.b64encode(svg.draw(chart, width, log=log).encode()).decode()
    lines = sorted(chart.lines, key=lambda line: line.ghost)
    values = ", ".join(f"{line.label} {numbers.metric(line.last)}".strip() for line in lines)
    alt = escape(f"{cut(chart.title)}: {values}")
    image = f'<img src="data:image/svg+xml;base64,{data}" alt="{alt}" style="display:block;width:100%;margin:2px 0 0">'
    share = "100%" if width > 400 else "49%"  # smaller where the page is narrow; one above the other on a phone
    box = f"display:inline-block;vertical-align:top;width:{share};min-width:270px;margin:0 1% 8px 0"
    return f'<div style="{box}">{caption(chart)}{image}</div>'


def _text(text: str) -> str:
    """What a user has written, in one line."""
    return escape(plain(text[:LINE_CHARS]))


def _head(status: Status) -> str:
    waits = {_waits(rank) for rank in status.ranks} - {""}
    text, color = (min(waits), AMBER) if waits else (status.state, _COLORS[status.state])
    chip = f"display:inline-block;padding:2px 12px 2px 10px;border-radius:99px;font-weight:600;color:{color}"
    facts = [_text(status.summary)] + ([] if status.over else [clock(status.seconds)])
    return (
        f'<span style="{chip};{_tint(color)}">{_dot(color)}{_text(capital(text))}</span> &nbsp;'
        f'<b style="font-size:14px">{_text(status.name)}</b> &nbsp;'
        f'<span style="{_SOFT}">{" · ".join(filter(None, facts))}</span>'
    )


def _waits(rank: RankStatus) -> str:
    """``paused at line 3``, ``waiting for input``."""
    if not rank.waits or rank.state != "running":
        return ""
    return f"{'paused' if rank.waits.startswith('at ') else 'waiting'} {rank.waits}"


def _tint(color: str) -> str:
    return f"background:rgba({','.join(str(int(color[i : i + 2], 16)) for i in (1, 3, 5))},.13)"


def _dot(color: str) -> str:
    look = f"display:inline-block;width:8px;height:8px;margin:0 8px 0 0;border-radius:50%;background:{color}"
    return f'<span class="nbddp-dot" style="{look}"></span>'


def _bar(fraction: float | None, state: str) -> str:
    fraction = 1.0 if fraction is None and state == "finished" else fraction
    width = f"{100 * (1.0 if fraction is None else fraction):.1f}%"
    fill = f"height:4px;border-radius:2px;width:{width};background:{_COLORS[state]}"
    fill += ";opacity:.3" if fraction is None else ""
    track = "height:4px;border-radius:2px;margin:8px 0 10px;background:rgba(128,128,128,.2)"
    return f'<div style="{track}"><div style="{fill}"></div></div>'


def _notes(history: History, status: Status) -> Iterable[str]:
    if status.restarts:
        yield _note("↻", AMBER, restarted(status, history))
    if status.error:
        yield _note("●", RED, status.error)
    if status.hang:
        first, _, stacks = status.hang[:_STACKS_CHARS].partition("\n")
        missing = len(status.hang) - _STACKS_CHARS
        stacks += f"\n… {missing:,} more characters" if missing > 0 else ""
        yield _note("▲", AMBER, first, _details("Stacks", stacks, is_open=status.over))
    for text in notices(history):
        yield _note("▲", AMBER, text)
    yield _note("", "", status.remark)


def _note(sign: str, color: str, text: str, more: str = "") -> str:
    if not sign:
        return f'<div style="margin:0 0 8px;{_SOFT}">{_text(text)}</div>' if text else ""
    box = f"margin:0 0 10px;padding:7px 11px;border-left:3px solid {color};border-radius:6px;{_tint(color)}"
    return f'<div style="{box}"><span style="color:{color}">{sign}</span> {_text(text)}{more}</div>'


def _details(summary: str, text: str, *, is_open: bool) -> str:
    """Lines of text that can be folded."""
    lines = "\n".join(plain(line.expandtabs())[:LINE_CHARS] for line in text.strip("\n").split("\n"))
    pre = f'<pre style="{_PRE}">{escape(lines)}</pre>'
    return f'<details style="margin:4px 0"{" open" * is_open}><summary>{summary}</summary>{pre}</details>'


def _last_output(status: Status, tail: Callable[[int, int], str]) -> str:
    """What the failed rank printed last."""
    failed = status.failed_rank
    if failed is None or not (text := tail(failed, _OUTPUT_CHARS).rstrip()):
        return ""
    host = next((f" on {_text(rank.host)}" for rank in status.ranks if rank.rank == failed and rank.host), "")
    lines = "\n".join(text.split("\n")[-_OUTPUT_LINES:])
    return _details(f"Last output of rank {failed}{host}", lines, is_open=True)


def _tiles(history: History, status: Status, now: Progress) -> str:
    counts = [("Step", now.step, now.steps)] if now.step is not None else []
    tiles = [(cut(name), f"{n:,}", f"of {total:,}" if total else "") for name, n, total in counts + now.loops]
    tiles += [(cut(name), escape(cut(text)), "") for name, text in now.postfix.items()][:_MAX_TILES]
    last = [("Throughput", f"{now.throughput:,.0f}", "samples/s")] if now.throughput else []
    if status.over:
        last.append(("Total time", duration(status.seconds), ""))
    elif now.left is not None:
        last.append(("Time left", duration(now.left), ""))
    latest = history.latest()
    newest = _newest(latest)[: max(0, _MAX_TILES - len(tiles) - len(last))]
    tiles += [*((tile_label(name), numbers.metric(latest[name]), "") for name in newest), *last]
    cells = "".join(
        f'<div style="{_TILE}"><div style="{_SMALL}">{escape(label)}</div><b style="font-size:17px">{value}</b> '
        f'<span style="{_SMALL}">{unit}</span></div>'
        for label, value, unit in tiles
    )
    # The borders left of a row's first tile are cut off, wherever the rows are broken.
    return f'<div style="overflow:hidden"><div style="margin-left:-11px">{cells}</div></div>' if tiles else ""


def _newest(latest: dict[str, float]) -> list[str]:
    """The metrics in the order of the tiles: of each chart one, of later charts the validation metric."""
    families: dict[str, list[str]] = {}
    for name in latest:
        families.setdefault(described(name)[0], []).append(name)
    first = [next((n for n in each if i and "val" in n.lower()), each[0]) for i, each in enumerate(families.values())]
    return [*first, *(name for name in latest if name not in first)]


def _key(color: str, label: str, value: str) -> str:
    red = f"color:{RED};font-weight:700" if value in ("NaN", "∞", "−∞") else ""
    text = f'{escape(label)} <span style="{red}">{value}</span>'
    return f'<span style="display:inline-block;margin-left:12px"><span style="color:{color}">━</span> {text}</span>'


def _table(history: History, status: Status) -> str:
    """The first ranks, of many those in trouble; the others can be unfolded."""
    notes, ranks = lagging(history, status), list(status.ranks)
    if len(ranks) > _FIRST_ROWS:
        ranks.sort(key=lambda rank: (rank.state != "failed", rank.rank not in notes))
    heads = "".join(
        f'<th style="width:{width}%;{_CELL};font-weight:400;border-bottom:1px solid {_LINE}">'
        f'<span style="{_SMALL}">{name}</span></th>'
        for name, width in _COLUMNS.items()
    )

    def table(ranks: list[RankStatus]) -> str:
        ranks = sorted(ranks, key=lambda rank: rank.rank)
        rows = "".join(_row(rank, history.ranks[rank.rank], notes.get(rank.rank, "")) for rank in ranks)
        look = "width:100%;font-size:13px;white-space:nowrap;border-collapse:collapse;table-layout:auto"
        return f'<div style="overflow-x:auto"><table style="{look}"><tr>{heads}</tr>{rows}</table></div>'

    rest, left_out = ranks[_FIRST_ROWS:_MAX_ROWS], len(ranks) - _MAX_ROWS
    more = f'<div style="{_SOFT}">and {left_out} more</div>' if left_out > 0 else ""
    summary = f'<summary style="{_SOFT}">and {len(ranks) - _FIRST_ROWS} more</summary>'
    first = table(ranks[:_FIRST_ROWS]) if ranks else ""
    return first + (f'<details style="margin:4px 0">{summary}{table(rest)}{more}</details>' if rest else "")


def _row(rank: RankStatus, done: RankProgress, note: str) -> str:
    waits = _waits(rank)
    pill = f' <span style="font-size:11px;color:{AMBER}">{escape(note)}</span>' if note else ""
    seconds = done.step_seconds
    cells = (
        str(rank.rank),
        " · ".join(_text(cut(text)) for text in (rank.host, rank.device) if text),
        f"{_dot(AMBER if waits else _COLORS[rank.state])}{_text(waits or rank.state)}{pill}",
        f"{done.step:,}" if done.step >= 0 else "–",
        "–" if not seconds else f"{seconds * 1000:.1f} ms" if seconds < 1 else f"{seconds:.1f} s",
        _memory(rank),
    )
    return "<tr>" + "".join(f'<td style="{_CELL}">{cell}</td>' for cell in cells) + "</tr>"


def _memory(rank: RankStatus) -> str:
    if rank.gpu is None:
        return numbers.size(rank.resident) if rank.resident else ""
    used, total = rank.gpu
    look = "vertical-align:middle;height:5px;border-radius:3px"
    share = f'<div style="width:{48 * used / max(1, total):.0f}px;{look};background:#888"></div>'
    gauge = f'<div style="display:inline-block;width:48px;{look};background:rgba(128,128,128,.25)">{share}</div>'
    return f"{gauge} &nbsp;{used / 2**30:.1f} / {total / 2**30:.0f} GiB"
