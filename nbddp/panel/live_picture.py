"""Shows a run as a picture that is renewed while the run goes on: it needs neither a script nor a comm in the page."""

from __future__ import annotations

import dataclasses
import threading
import time
from typing import Any

from nbddp.panel import frontend
from nbddp.panel.figures import html as figures_html
from nbddp.panel.picture import Picture
from nbddp.panel.text import OutputWriter
from nbddp.panel.view import Status, Viewable

_INTERVAL_S = 1.0  # between two pictures
_BYTES_PER_S = 8_000  # on average: 4.8 MB in ten minutes
_HTML_BYTES = 14_000  # of a picture while the run goes on, so that it is at most 1.75 s old
_LEAST_SVG_BYTES = 2_000
_FIGURE_BYTES = 24_000  # of all that the ranks have shown; a picture with so many comes every 5 s
_TRIES = 3  # to find the size of the curves in one picture


class PictureView:
    """The picture in a cell's output, replaced by ``update_display`` when something has changed."""

    live = True

    def __init__(self, run: Viewable, *, with_output: bool = True) -> None:
        self._run = run
        self._writer = OutputWriter() if with_output else None
        self._handle: Any = None
        self._shown: object = None  # what the last picture shows
        self._next_at = 0.0
        self._svg_bytes = _HTML_BYTES * 2 // 3
        self._closed = False
        self._lock = threading.Lock()

    def update(self, status: Status) -> None:
        with self._lock:  # a background run is updated by the cell that opens the view and by the run's own thread
            if self._closed:
                return
            self._closed = status.over
            if status.over:
                self._finish(status)
            elif time.monotonic() >= self._next_at:
                self._renew(status)

    def write(self, text: str) -> None:
        if self._writer is not None:
            self._writer.write(text)

    def _finish(self, status: Status) -> None:
        if self._writer is not None:
            self._writer.finish()
        self._show(Picture(self._run.history, status, self._run).bundle())

    def _renew(self, status: Status) -> None:
        history = self._run.history
        shown = (dataclasses.replace(status, seconds=0.0, ranks=()), history.changes(), history.figures.changes)
        if shown == self._shown:
            return
        self._shown = shown
        data = self._bundle(status)
        size = sum(len(text.encode()) for text in data.values())
        self._next_at = time.monotonic() + max(_INTERVAL_S, size / _BYTES_PER_S)
        self._show(data)

    def _bundle(self, status: Status) -> dict[str, str]:
        """The picture, with as many points of the curves as fit into the size of a picture."""
        stop = "■ ends the run" if status.blocking else "run.stop() ends it"
        remark = " · ".join(filter(None, [status.notice, f"as of {time.strftime('%H:%M:%S')}", stop]))
        status = dataclasses.replace(status, remark=remark)
        figures = sum(map(len, figures_html(self._run.history.figures, _FIGURE_BYTES)))
        for _ in range(_TRIES):
            picture = Picture(
                self._run.history, status, self._run, max_bytes=self._svg_bytes, figure_bytes=_FIGURE_BYTES
            )
            data = picture.bundle()
            excess = len(data["text/html"].encode()) - figures - _HTML_BYTES
            if excess <= 0:
                self._svg_bytes += min(-excess, _HTML_BYTES) // 4  # there may be room for more points next time
                break
            self._svg_bytes = max(_LEAST_SVG_BYTES, self._svg_bytes - excess)
        return data

    def _show(self, data: dict[str, str]) -> None:
        if frontend.is_marimo():
            return frontend.show_in_marimo(data["text/html"])
        from IPython.display import display

        if self._handle is None:
            self._handle = display(data, raw=True, display_id=True)  # type: ignore[no-untyped-call]
        else:
            self._handle.update(data, raw=True)
        return None
