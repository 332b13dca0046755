"""Builds the panel's messages to a page: frames with the changes since the last frame, and snapshots."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from nbddp.history.history import Cursor, Series, Spread
from nbddp.panel import ranks, summary, thinning
from nbddp.panel.ghost import Ghost
from nbddp.panel.view import Status, Viewable

_HEAD_INTERVAL_S = 1.0  # an unchanged head is sent again after this time, for the page's clock
_FRAME_POINTS = 400  # per metric and frame; more would not be visible, and Jupyter servers limit the data rate
_SNAPSHOT_POINTS = 24_000  # of all metrics together
_NAME_CHARS = 120
_HANG_CHARS = 64 << 10
_LOG_BYTES = 16 << 10  # per frame, all ranks together
_LAST_LOG_BYTES = 128 << 10  # per rank, in the last frame
_LOG_TAIL_CHARS = 64 << 10  # per rank, for snapshots

_START = Cursor()


@dataclass
class _Line:
    """How much of one metric the page has."""

    index: int
    name: str
    cursor: Cursor = _START
    stride: float = 0.0
    changes: int = 0  # the history's counter when the last frame was built


@dataclass
class _Log:
    """How much of one rank's output the page has."""

    position: int = 0
    tail: str = field(default="", repr=False)


class Feed:
    """Turns a run into messages: frames with the changes, and snapshots of everything so far. Uses no widget.

    A message is a JSON-serializable dict and one block of float64. May be used from several threads.
    """

    def __init__(self, source: Viewable, clock: Callable[[], float] = time.monotonic) -> None:
        self._source = source
        self._clock = clock
        self._lock = threading.RLock()
        self._seq = 0
        self._lines: list[_Line] = []
        self._ghost = Ghost(source.earlier)
        self._logs: list[_Log] = []
        self._head: dict[str, Any] = {}
        self._head_at = float("-inf")
        self._hang: list[str] = []

    def frame(self, status: Status) -> tuple[dict[str, Any], bytes] | None:
        """The changes since the last frame; None if there are none."""
        with self._lock:
            known = len(self._lines)
            entries, defs, arrays = self._new_points()
            ghosts, behind = self._ghosts(self._lines[known:])
            logs = self._new_logs(status)
            rest = self._new_head(status)
            hang = summary.hang_lines(status, _HANG_CHARS)
            if hang != self._hang:  # not a part of the head, which is sent every second: the stacks may be long
                self._hang = rest["hang"] = hang
            if not (entries or logs or rest):
                return None
            self._seq += 1
            content = {"kind": "frame", "seq": self._seq, "defs": defs, "series": entries, "logs": logs, **rest}
            return content | {"ghosts": ghosts}, _packed(arrays + behind)

    def snapshot(self) -> tuple[dict[str, Any], bytes]:
        """Everything that the frames so far contained, thinned for the screen."""
        with self._lock:
            entries, arrays = [], []
            for line in self._lines:
                series, spread = self._thinned(*self._source.history.points_up_to(line.name, line.cursor))
                arrays += [*series, *spread]
                entries.append(self._entry(line, series, spread, fresh=False))
            ghosts, behind = self._ghosts(self._lines)
            logs = [[rank, log.tail, True] for rank, log in enumerate(self._logs) if log.tail]
            head = self._head_of(self._source.status())
            content = {"kind": "snapshot", "seq": self._seq, "head": head, "logs": logs, "hang": self._hang}
            content |= {"defs": [_definition(line) for line in self._lines], "series": entries, "ghosts": ghosts}
            return content, _packed(arrays + behind)

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
            series, spread, fresh = self._points_to_send(line)
            if fresh or len(series.steps) or len(spread.steps):
                arrays += [*series, *spread]
                entries.append(self._entry(line, series, spread, fresh=fresh))
        return entries, defs, arrays

    def _points_to_send(self, line: _Line) -> tuple[Series, Spread, bool]:
        """The points that the page lacks, and whether they replace those that it has."""
        before = line.cursor.version
        series, spread, line.cursor = self._source.history.new_points(line.name, line.cursor)
        fresh = line.cursor.version != before
        if fresh:
            line.stride = 0.0
        line.stride = line.stride or thinning.stride(series)
        if fresh and before:  # the whole curve again, with as many points as in a snapshot
            return *self._thinned(series, spread), fresh
        return thinning.thin(series, _FRAME_POINTS), thinning.thin_spread(spread, _FRAME_POINTS), fresh

    def _thinned(self, series: Series, spread: Spread) -> tuple[Series, Spread]:
        points = _SNAPSHOT_POINTS // max(1, len(self._lines))
        thin, band = thinning.forward(series), thinning.forward(spread)
        return thinning.thin(thin, points), thinning.thin_spread(band, points // 2)

    def _ghosts(self, lines: list[_Line]) -> tuple[list[Any], list[npt.NDArray[Any]]]:
        """The earlier run's curves of these metrics, which are sent after all other points."""
        entries, arrays = [], []
        for line in lines:
            series = self._ghost.points(line.name)
            if len(series.steps):
                arrays += [*series]
                entries.append({"index": line.index, "points": len(series.steps)})
        return entries, arrays

    def _entry(self, line: _Line, series: Series, spread: Spread, *, fresh: bool) -> dict[str, Any]:
        points, band = len(series.steps), len(spread.steps)
        before = self._ghost.near(line.name, int(series.steps[-1])) if points else None
        sizes = {"index": line.index, "points": points, "spread": band}
        return {**sizes, "stride": line.stride, "fresh": fresh, "before": before}

    # ------------------------------------------------------------------ output and numbers

    def _new_logs(self, status: Status) -> list[Any]:
        while len(self._logs) < len(status.ranks):
            self._logs.append(_Log())
        limit = _LAST_LOG_BYTES if status.over else _LOG_BYTES // max(1, len(self._logs))
        added: list[Any] = []
        for rank, log in enumerate(self._logs):
            text, log.position, follows = self._source.output(rank, log.position, limit)
            if not text:
                continue
            log.tail = ((log.tail if follows else "") + text)[-_LOG_TAIL_CHARS:]
            added.append([rank, text, not follows])
        return added

    def _new_head(self, status: Status) -> dict[str, Any]:
        head = self._head_of(status)
        same = {**head, "seconds": 0} == {**self._head, "seconds": 0}
        if same and (status.over or self._clock() - self._head_at < _HEAD_INTERVAL_S):
            return {}
        self._head, self._head_at = head, self._clock()
        return {"head": head}

    def _progress(self, status: Status) -> summary.Progress:
        history = self._source.history
        found = summary.progress(history, over=status.over)
        if any(rank.bars for rank in history.ranks):
            return found
        printed = summary.from_output(log.tail for log in self._logs)
        return dataclasses.replace(printed, throughput=found.throughput) if printed else found

    def _head_of(self, status: Status) -> dict[str, Any]:
        history = self._source.history
        rows = ranks.rows(status, history, time.time())
        return {
            "state": status.state,
            "name": summary.plain(status.name),
            "summary": summary.plain(_subtitle(status)),
            "seconds": round(status.seconds, 1),
            "error": summary.plain(status.error),
            "names": [[summary.plain(name), summary.plain(text)] for name, text in status.failing_names],
            "in_debugger": any(rank.debugger for rank in status.ranks),
            "held": [[summary.plain(name), summary.plain(text)] for name, text in status.held],
            "restarted": summary.restart_text(status),
            "remark": " · ".join(filter(None, [summary.plain(status.remark), *summary.notices(history)])),
            "marks": [dataclasses.asdict(mark) for mark in summary.marks(history)],
            "failed_rank": status.failed_rank,
            "blocking": status.blocking,
            "earlier": self._ghost.description(),
            **dataclasses.asdict(self._progress(status)),
            "rows": [dataclasses.asdict(row) for row in rows],
            "hosts": [dataclasses.asdict(host) for host in ranks.hosts(rows)],
        }


def _definition(line: _Line) -> dict[str, Any]:
    words = dataclasses.asdict(summary.describe(line.name)) | {"name": summary.plain(line.name)}
    return {"index": line.index, **{key: text[:_NAME_CHARS] for key, text in words.items()}}


def _packed(arrays: list[npt.NDArray[Any]]) -> bytes:
    return b"".join(np.ascontiguousarray(array, dtype="<f8").tobytes() for array in arrays)


def _subtitle(status: Status) -> str:
    """The line below the run's name."""
    return " · ".join(filter(None, [status.notice, status.waits_for])) if status.notice else status.summary
