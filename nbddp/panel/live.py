"""Shows a run in a cell's output: the live panel, or a picture that is renewed; in the end a picture that stays."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import threading
import time
import uuid
from typing import Any

from nbddp.panel import frontend, html
from nbddp.panel.status import Source, Status
from nbddp.panel.text_view import TextView, end_line

_PICTURE_S = 30.0  # the age at which the picture under a live panel is replaced
_FIRST_S = 3.0  # the age of the first one, which shows nothing yet
_BYTES_PER_S = 8_000  # of pictures, which some services keep all: 4.8 MB in ten minutes
_LIVE = 16  # panels of finished runs that stay live

_finished: collections.deque[Any] = collections.deque()


def view_for(source: Source, show: bool | str | None = None) -> View:
    """The view of a run that was asked for, or the best one here."""
    kind, status = frontend.kind(show), source.status()
    if frontend.marimo() and not (status.blocking or status.over):
        kind = "text"  # an output there belongs to the running cell
    if kind == "text":
        return ExecutedView(source) if frontend.is_executed() else TextView(source)
    return CellView(source, is_live=kind == "panel")


class ExecutedView(TextView):
    """For a program that executes the notebook (papermill, nbconvert): lines of text, and the picture at the end."""

    def _write_end(self, source: Source, status: Status) -> None:
        from IPython.display import display

        if source.history.latest():
            self.cell = frontend.cell_number()
            display(_bundle(source, status), raw=True)  # type: ignore[no-untyped-call]
        else:
            super()._write_end(source, status)


class CellView:
    """A run in a cell's output, from the first process on.

    In JupyterLab and Notebook 7 the output is a picture, and the panel's script takes its place in the page: the saved
    file holds only the picture. Elsewhere the output is the panel, and in the end the picture; or always a picture.
    """

    def __init__(self, source: Source, *, is_live: bool) -> None:
        self._source: Source | None = source
        self._is_live = is_live
        self.cell = frontend.cell_number()
        self._place = f"nbddp-{uuid.uuid4().hex}" if is_live and frontend.shares_page() else ""
        self._panel: Any = None
        self._handle: Any = None
        self._due = 0.0  # the next picture
        self._drawn: object = None  # what the last one shows
        self._lock = threading.Lock()

    def update(self) -> None:
        with self._lock:  # a run in the background is shown by a cell and followed by a thread
            if (source := self._source) is None:
                return
            if self._is_live and self._panel is None:
                from nbddp.panel.widget import Panel  # this takes seconds, in which the run goes on

                self._panel = Panel(self._place, frontend.kernel_id())
                self._panel.on_msg(self._hear)
            status = source.status()
            if self._panel is not None:
                self._panel.update(source, status)
            if status.over or time.monotonic() >= self._due:
                self._draw(source, status)
            if status.over:
                self._leave()

    def _hear(self, panel: Any, content: dict[str, Any], buffers: Any) -> None:
        """The page speaks, on any thread."""
        if content.get("kind") == "stop" and (source := self._source) is not None:
            source.stop()

    def _draw(self, source: Source, status: Status) -> None:
        """Renew the picture. Where it's all there is, pages get the changes, and some services keep each one."""
        if self._is_live:
            self._due = time.monotonic() + (_PICTURE_S if self._handle else _FIRST_S)
            data = _bundle(source, status, self._place)
            frontend.say_busy()
            if not self._place and not status.over:
                self._due = float("inf")  # it's for readers that show no widget
                data = self._panel._repr_mimebundle_()[0] | data
            return self._show(data, over=status.over)
        ranks = [(rank.state, rank.waits) for rank in status.ranks]  # a gauge alone renews no picture
        arrived_at = [rank.arrived_at for rank in source.history.ranks]
        now = dataclasses.replace(status, seconds=0.0, ranks=()), ranks, arrived_at
        if now != self._drawn:
            self._drawn = now
            data = _bundle(source, status, points=300 if status.over else 100)
            self._due = time.monotonic() + max(1.0, sum(map(len, data.values())) / _BYTES_PER_S)
            self._show(data, over=status.over)

    def _show(self, data: dict[str, Any], *, over: bool) -> None:
        if marimo := frontend.marimo():
            live = self._panel is not None and not over
            self._handle = marimo
            marimo.output.replace(marimo.ui.anywidget(self._panel) if live else marimo.Html(data["text/html"]))
        elif self._handle is None:
            from IPython.display import display

            self._handle = display(data, raw=True, display_id=True)  # type: ignore[no-untyped-call]
        else:
            self._handle.update(data, raw=True)

    def _leave(self) -> None:
        """Let the run go; the panel stays in a page that it shares, until there are many."""
        if self._panel is not None:
            _finished.append(self._panel)
        self._source = self._panel = None
        while len(_finished) > (_LIVE if self._place else 0):
            with contextlib.suppress(IndexError):  # another thread has taken it
                _finished.popleft().leave()


View = TextView | CellView


def _bundle(source: Source, status: Status, place: str = "", points: int = 300) -> dict[str, str]:
    if not status.over:
        status = dataclasses.replace(status, remark=f"as of {time.strftime('%H:%M:%S')}, still running")
    picture = html.picture(source.history, status, source.before, name=place, points=points, tail=source.tail)
    return {"text/html": picture, "text/plain": end_line(source.history, status)}
