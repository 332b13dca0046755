"""Shows a run in a cell's output: the live panel, or a picture that is renewed; in the end a picture that stays."""

from __future__ import annotations

import collections
import dataclasses
import threading
import time
import uuid
from typing import Any

from nbddp.panel import frontend, html
from nbddp.panel.status import Source, Status, View
from nbddp.panel.text_view import TextView, end_line

_PICTURE_S = 30.0  # the age at which the picture under a live panel is replaced
_FIRST_S = 3.0  # the age of the first one, which shows nothing yet
_BYTES_PER_S = 8_000  # of pictures, which some services keep all: 4.8 MB in ten minutes
_LIVE = 16  # panels of finished runs that stay live

_finished: collections.deque[Any] = collections.deque()


def view_for(source: Source, kind: bool | str | None = None) -> View:
    """The view of a run that was asked for, or the best one here."""
    kind = kind if isinstance(kind, str) else frontend.kind(asked=bool(kind))
    if kind == "text":
        return ExecutedView(source) if frontend.is_executed() else TextView(source)
    return CellView(source, live=kind == "panel")


class ExecutedView(TextView):
    """For a program that executes the notebook (papermill, nbconvert): lines of text, and the picture at the end."""

    def _write_end(self, status: Status) -> None:
        if not self._source.history.latest():
            return super()._write_end(status)
        from IPython.display import display

        self.cell = frontend.cell_number()
        display(_bundle(self._source, status), raw=True)  # type: ignore[no-untyped-call]
        return None


class CellView:
    """A run in a cell's output, from the first process on.

    In JupyterLab and Notebook 7 the output is a picture, and the panel's script takes its place in the page: the saved
    file holds the picture alone. Elsewhere the output is the panel, and in the end the picture.
    """

    def __init__(self, source: Source, *, live: bool) -> None:
        self._source: Source | None = source
        self._is_live = live
        self.cell = frontend.cell_number()
        self._place = f"nbddp-{uuid.uuid4().hex}" if live and frontend.shares_page() else ""
        self._panel: Any = None
        self._frames: Any = None
        self._handle: Any = None
        self._due = 0.0  # the next picture
        self._lock = threading.Lock()

    def update(self) -> None:
        with self._lock:  # a run in the background is shown by a cell and followed by a thread
            if (source := self._source) is None:
                return
            if self._is_live and self._panel is None:
                self._open(source)  # the first import takes seconds, in which the run goes on
            status = source.status()
            if self._panel is not None and (frame := self._frames.next(status)):
                self._panel.frame = frame
                self._panel.logs = {str(rank.rank): source.tail(rank.rank, _LOG_CHARS) for rank in status.ranks}
            if status.over or time.monotonic() >= self._due:
                self._update_picture(source, status)
            if status.over:
                self._leave()

    def _open(self, source: Source) -> None:
        from nbddp.panel.widget import Frames, Panel

        self._frames = Frames(source.history, source.before)
        self._panel = Panel(place=self._place, kernel_id=frontend.kernel_id())

        def hear(_: Any, content: dict[str, Any], __: Any) -> None:
            if content.get("kind") == "stop":
                source.stop()

        self._panel.on_msg(hear)

    def _update_picture(self, source: Source, status: Status) -> None:
        data = _bundle(source, status, self._place)
        first = self._handle is None
        if self._is_live:
            self._due = time.monotonic() + (_FIRST_S if first else _PICTURE_S)
        else:
            self._due = time.monotonic() + max(1.0, len(data["text/html"]) / _BYTES_PER_S)
        if self._is_live and not self._place and not status.over:
            if not first:
                return
            data = self._panel._repr_mimebundle_()[0] | data
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
        """The run goes; the panel stays in a page that it shares, until there are many."""
        self._source = None
        if self._panel is not None:
            _finished.append(self._panel)
        while len(_finished) > (_LIVE if self._place else 0):
            _finished.popleft().close()


_LOG_CHARS = 6_000


def _bundle(source: Source, status: Status, place: str = "") -> dict[str, str]:
    if not status.over:
        status = dataclasses.replace(status, remark=f"as of {time.strftime('%H:%M:%S')}, still running")
    picture = html.picture(source.history, status, source.before, name=place, tail=source.tail)
    return {"text/html": picture, "text/plain": end_line(source.history, status)}
