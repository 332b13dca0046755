"""Kernel side. The live panel of a run: what changed goes to the page, at the end a picture takes its place."""

from __future__ import annotations

import dataclasses
import os
import re
import sys
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from nbddp.kernel.history import History, Seen, Series, Spread
from nbddp.panel import summary
from nbddp.panel.picture import Picture
from nbddp.panel.text import Echo, TextView, end_text
from nbddp.panel.view import Source, Status, View

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from nbddp.panel.widget import PanelWidget

_HEAD_S = 1.0  # numbers that have not changed are told again so often, for the page's clock
_FRAME_POINTS = 400  # per metric and frame; more cannot be seen, and the server drops what is too much
_SNAPSHOT_POINTS = 24_000  # of all metrics together
_NAME_CHARS = 120
_HANG_CHARS = 64 << 10
_LOG_BYTES = 16 << 10  # per frame, all ranks together
_LOG_REST = 128 << 10  # per rank, in the last frame
_LOG_TAIL = 64 << 10  # per rank, for a page that comes late
_SOON_S = (0.3, 1.0, 2.0, 4.0, 8.0, 16.0)  # to a page that cannot answer: it may have missed the first frames

_NOTHING = Seen()

# A Python client (nbclient, papermill, a terminal console) names its messages session_pid_count
# (jupyter_client 7) or session_count; JupyterLab, VS Code and Colab name them by a UUID.
_PYTHON_CLIENT = re.compile(r".+_\d+")


def shell() -> InteractiveShell | None:
    """The notebook kernel's shell; None in a terminal or a script."""
    from IPython import get_ipython

    current = get_ipython()
    return current if getattr(current, "kernel", None) is not None else None


def has_page() -> bool:
    """Is it likely that a page with widgets shows this cell's output?"""
    if shell() is None:
        return False
    parent = _request()
    # A server extension may execute for JupyterLab, and Colab's messages come by a way of its own.
    by_page = "cellId" in parent.get("metadata", {}) or "google.colab" in sys.modules
    return by_page or not _PYTHON_CLIENT.fullmatch(str(parent.get("header", {}).get("msg_id", "")))


def finds_its_picture() -> bool:
    """Is it JupyterLab or Notebook 7, where a widget's script runs in the same page as any cell's HTML?

    VS Code names its cells by an address; Colab has a frame for each output.
    """
    cell = str(_request().get("metadata", {}).get("cellId", ""))
    return bool(cell) and ":" not in cell and "google.colab" not in sys.modules


def _request() -> dict[str, Any]:
    """The message that the kernel is executing, {} if none."""
    kernel: Any = getattr(shell(), "kernel", None)
    return kernel.get_parent() if hasattr(kernel, "get_parent") else {}


def kernel_id() -> str:
    """By which a Jupyter server knows this kernel: it names the connection file after it."""
    app = getattr(getattr(shell(), "kernel", None), "parent", None)
    connection_file = str(getattr(app, "connection_file", ""))
    match = re.fullmatch(r"kernel-(.+)\.json", os.path.basename(connection_file))
    return match[1] if match else ""


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
        line.stride = line.stride or summary.stride(series)
        if fresh and before:  # the whole curve anew: as fine as in a snapshot
            return *self._thinned(series, spread, self._snapshot_points()), fresh
        return summary.thin(series, _FRAME_POINTS), summary.thin_spread(spread, _FRAME_POINTS), fresh

    def _told(self, line: _Line) -> tuple[Series, Spread]:
        """The points of a metric that frames have told."""
        series, spread = self._source.history.seen_points(line.name, line.seen)
        return self._thinned(series, spread, self._snapshot_points())

    def _snapshot_points(self) -> int:
        return _SNAPSHOT_POINTS // max(1, len(self._lines))

    def _thinned(self, series: Series, spread: Spread, points: int) -> tuple[Series, Spread]:
        thin, band = summary.forward(series), summary.forward(spread)
        return summary.thin(thin, points), summary.thin_spread(band, points // 2)

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


def view_for(source: Source, *, wanted: bool, again: bool, echo: bool) -> View:
    """The best view that this place can show.

    Args:
        wanted: the user asked for the panel: where a kernel is, it is shown whatever the front end seems to be.
        again: not the run's own cell, but ``run.show()``.
        echo: rank 0's output is shown beside it.
    """
    if shell() is None:
        return TextView()
    if wanted or has_page():
        return PanelView(source, echo=echo, stays_live=again and source.status().over)
    return ExecutedView(source)


class ExecutedView(TextView):
    """For a notebook that no page shows while it runs (papermill, nbconvert): lines, and at the end the picture."""

    def __init__(self, source: Source) -> None:
        super().__init__()
        self._source = source

    def _say_end(self, status: Status, history: History) -> None:
        from IPython.display import display

        if history.latest():
            picture = Picture(history, status, self._source)
            display(picture.bundle(), raw=True)  # type: ignore[no-untyped-call]
        else:
            super()._say_end(status, history)


class PanelView:
    """The panel in a cell's output, from the first process to the picture that stays."""

    live = True

    def __init__(self, source: Source, *, echo: bool = True, stays_live: bool = False) -> None:
        self._source = source
        self._feed = Feed(source)
        self._echo = Echo() if echo else None
        self._stays_live = stays_live
        self._widget: PanelWidget | None = None
        self._handle: Any = None
        self._pages: set[str] = set()
        self._left = False
        self._lock = threading.Lock()
        self._began = time.monotonic()
        self._snapshots_due = list(_SOON_S)

    def update(self, status: Status, history: History) -> None:
        with self._lock:  # of a background run, the cell that opens it and the run's own thread
            if not self._left:
                self._update(status, history)

    def _update(self, status: Status, history: History) -> None:
        if self._widget is None:
            self._open(status, history)
        frame = self._feed.frame(status)
        if frame is not None:
            self._send(frame)
        self._repeat_for_the_deaf()
        if status.over and not self._stays_live:
            self._leave_picture(status, history)

    def write(self, text: str) -> None:
        if self._echo is not None:
            self._echo.write(text)

    # ------------------------------------------------------------------ the page

    def _open(self, status: Status, history: History) -> None:
        from IPython.display import display

        from nbddp.panel.widget import PanelWidget

        self._feed.frame(status)
        place = f"nbddp-{uuid.uuid4().hex}" if self._stays_live and finds_its_picture() else ""
        self._widget = PanelWidget(kernel_id(), self._feed.snapshot, place)
        self._widget.on_msg(self._hear)
        if place:
            data = Picture(history, status, self._source).bundle(place)
        else:
            data = self._widget.bundle() | {"text/plain": end_text(status, history)}
        self._handle = display(data, raw=True, display_id=True)  # type: ignore[no-untyped-call]

    def _send(self, message: tuple[dict[str, Any], bytes]) -> None:
        content, data = message
        assert self._widget is not None
        self._widget.send(content, buffers=[data])

    def _hear(self, _widget: object, content: Any, _buffers: object) -> None:
        """A message of the page; while a cell runs this is another thread, and all it may do is ask."""
        assert self._widget is not None
        self._widget.heard += 1
        if content.get("kind") == "stop":
            self._source.stop()
            self._widget.stopping = True
        elif content.get("kind") == "hello":
            self._pages.add(str(content.get("page")))
            self._send(self._feed.snapshot())

    def _repeat_for_the_deaf(self) -> None:
        """ipykernel 6 hears no hello while a cell runs: all so far, a few times, for a script that loaded late."""
        assert self._widget is not None
        if not self._snapshots_due or self._widget.heard:
            return
        if time.monotonic() - self._began >= self._snapshots_due[0]:
            del self._snapshots_due[0]
            self._send(self._feed.snapshot())

    def _leave_picture(self, status: Status, history: History) -> None:
        assert self._widget is not None
        self._left = True
        if self._echo is not None:
            self._echo.finish()
        self._handle.update(Picture(history, status, self._source).bundle(), raw=True)
        # A page that was reloaded does not know this cell's display any more, and keeps the panel.
        if len(self._pages) < 2:
            self._widget.leave()
