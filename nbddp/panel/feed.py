"""Kernel side. The panel's messages to a page, and how much of the run they have told it."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from nbddp.kernel.history import Seen, Series, Spread
from nbddp.panel import summary, thinning
from nbddp.panel.view import Source, Status

_HEAD_S = 1.0  # numbers that have not changed are told again so often, for the page's clock
_FRAME_POINTS = 400  # per metric and frame; more cannot be seen, and the server drops what is too much
_SNAPSHOT_POINTS = 24_000  # of all metrics together
_NAME_CHARS = 120
_HANG_CHARS = 64 << 10
_LOG_BYTES = 16 << 10  # per frame, all ranks together
_LOG_REST = 128 << 10  # per rank, in the last frame
_LOG_TAIL = 64 << 10  # per rank, for a page that comes late

_NOTHING = Seen()


@dataclass
class _Line:
    """How much of one metric the page has."""

    index: int
    name: str
    seen: Seen = _NOTHING
    stride: float = 0.0
    changes: int = 0  # when we last looked


@dataclass
class _Log:
    """How much of one rank's output the page has."""

    position: int = 0
    tail: str = field(default="", repr=False)


class Feed:
    """Turns a run into messages: frames of what is new, and snapshots of all so far. Knows no widget.

    A message is a JSON-able head and one block of float64. May be used from several threads.
    """

    def __init__(self, source: Source, clock: Callable[[], float] = time.monotonic) -> None:
        self._source = source
        self._clock = clock
        self._lock = threading.RLock()
        self._seq = 0
        self._lines: list[_Line] = []
        self._logs: list[_Log] = []
        self._head: dict[str, Any] = {}
        self._head_at = float("-inf")
        self._hang: list[str] = []

    def frame(self, status: Status) -> tuple[dict[str, Any], bytes] | None:
        """What is new since the last frame; None when nothing is."""
        with self._lock:
            entries, defs, arrays = self._new_points()
            logs = self._new_logs(status)
            rest = self._new_head(status) | self._new_hang(status)
            if not (entries or logs or rest):
                return None
            self._seq += 1
            content = {"kind": "frame", "seq": self._seq, "defs": defs, "series": entries, "logs": logs, **rest}
            return content, _packed(arrays)

    def snapshot(self) -> tuple[dict[str, Any], bytes]:
        """All that the frames so far have told, thinned for the screen."""
        with self._lock:
            entries, arrays = [], []
            for line in self._lines:
                series, spread = self._told(line)
                arrays += [*series, *spread]
                entries.append(_entry(line, series, spread, fresh=False))
            logs = [[rank, log.tail, True] for rank, log in enumerate(self._logs) if log.tail]
            head = self._head_of(self._source.status())
            content = {"kind": "snapshot", "seq": self._seq, "head": head, "logs": logs, "hang": self._hang}
            content |= {"defs": [_definition(line) for line in self._lines], "series": entries}
            return content, _packed(arrays)

    # ------------------------------------------------------------------ curves

    def _new_points(self) -> tuple[list[Any], list[Any], list[npt.NDArray[Any]]]:
        entries, defs, arrays = [], [], []
        for index, (name, changes) in enumerate(self._source.history.changes().items()):
            if index == len(self._lines):
                self._lines.append(_Line(index, name))
                defs.append(_definition(self._lines[index]))
            line = self._lines[index]
            if line.changes == changes:
                continue
            line.changes = changes
            series, spread, fresh = self._news(line)
            if fresh or len(series.steps) or len(spread.steps):
                arrays += [*series, *spread]
                entries.append(_entry(line, series, spread, fresh=fresh))
        return entries, defs, arrays

    def _news(self, line: _Line) -> tuple[Series, Spread, bool]:
        """What the page has not been told, and whether it takes the place of what it has."""
        before = line.seen.version
        series, spread, line.seen = self._source.history.new_points(line.name, line.seen)
        fresh = line.seen.version != before
        if fresh:
            line.stride = 0.0
        line.stride = line.stride or thinning.stride(series)
        if fresh and before:  # the whole curve anew: as fine as in a snapshot
            return *self._thinned(series, spread, self._snapshot_points()), fresh
        return thinning.thin(series, _FRAME_POINTS), thinning.thin_spread(spread, _FRAME_POINTS), fresh

    def _told(self, line: _Line) -> tuple[Series, Spread]:
        """The points of a metric that frames have told."""
        series, spread = self._source.history.seen_points(line.name, line.seen)
        return self._thinned(series, spread, self._snapshot_points())

    def _snapshot_points(self) -> int:
        return _SNAPSHOT_POINTS // max(1, len(self._lines))

    def _thinned(self, series: Series, spread: Spread, points: int) -> tuple[Series, Spread]:
        thin, band = thinning.forward(series), thinning.forward(spread)
        return thinning.thin(thin, points), thinning.thin_spread(band, points // 2)

    # ------------------------------------------------------------------ output and numbers

    def _new_logs(self, status: Status) -> list[Any]:
        while len(self._logs) < len(status.ranks):
            self._logs.append(_Log())
        limit = _LOG_REST if status.over else _LOG_BYTES // max(1, len(self._logs))
        news: list[Any] = []
        for rank, log in enumerate(self._logs):
            text, log.position, follows = self._source.output(rank, log.position, limit)
            if not text:
                continue
            log.tail = ((log.tail if follows else "") + text)[-_LOG_TAIL:]
            news.append([rank, text, not follows])
        return news

    def _new_head(self, status: Status) -> dict[str, Any]:
        head = self._head_of(status)
        same = {**head, "seconds": 0} == {**self._head, "seconds": 0}
        if same and (status.over or self._clock() - self._head_at < _HEAD_S):
            return {}
        self._head, self._head_at = head, self._clock()
        return {"head": head}

    def _new_hang(self, status: Status) -> dict[str, Any]:
        """Apart from the head, which is told every second: stacks of many ranks are long."""
        hang = summary.hang_lines(status, _HANG_CHARS)
        if hang == self._hang:
            return {}
        self._hang = hang
        return {"hang": hang}

    def _head_of(self, status: Status) -> dict[str, Any]:
        history = self._source.history
        rows = summary.rows(status, history, time.time())
        return {
            "state": status.state,
            "name": summary.plain(status.name),
            "summary": summary.plain(status.notice or status.summary),
            "seconds": round(status.seconds, 1),
            "error": summary.plain(status.error),
            "restarted": summary.restart_text(status),
            "remark": " · ".join(filter(None, [summary.plain(status.remark), *summary.notices(history)])),
            "marks": [dataclasses.asdict(mark) for mark in summary.marks(history)],
            "failed_rank": status.failed_rank,
            "blocking": status.blocking,
            **dataclasses.asdict(summary.progress(history, over=status.over)),
            "rows": [dataclasses.asdict(row) for row in rows],
            "hosts": [dataclasses.asdict(host) for host in summary.hosts(rows)],
        }


def _definition(line: _Line) -> dict[str, Any]:
    words = dataclasses.asdict(summary.describe(line.name)) | {"name": summary.plain(line.name)}
    return {"index": line.index, **{key: text[:_NAME_CHARS] for key, text in words.items()}}


def _entry(line: _Line, series: Series, spread: Spread, *, fresh: bool) -> dict[str, Any]:
    points, band = len(series.steps), len(spread.steps)
    return {"index": line.index, "points": points, "spread": band, "stride": line.stride, "fresh": fresh}


def _packed(arrays: list[npt.NDArray[Any]]) -> bytes:
    return b"".join(np.ascontiguousarray(array, dtype="<f8").tobytes() for array in arrays)
