"""The live panel of a run: sends changes to the page, and keeps the picture that the notebook's file contains."""

from __future__ import annotations

import collections
import dataclasses
import threading
import time
import uuid
from typing import TYPE_CHECKING, Any

from nbddp.panel import frontend
from nbddp.panel.csv_parts import CsvParts
from nbddp.panel.feed import Feed
from nbddp.panel.figures import FiguresFeed
from nbddp.panel.frontend import is_jupyter, kernel_id, say_busy
from nbddp.panel.picture import Picture
from nbddp.panel.text import OutputWriter, TextView
from nbddp.panel.view import Status, Viewable

if TYPE_CHECKING:
    from nbddp.panel.widget import PanelWidget

_PICTURE_S = 30.0  # the age at which the picture under a live panel is replaced
_KEPT = 16  # panels of finished runs that stay live; each keeps its run's history in memory
_IDLE_S = (0.3, 1.0, 3.0)  # after a message from the page, the page may take the kernel for idle
_RESEND_S = (0.3, 1.0, 2.0, 4.0, 8.0, 16.0)  # after the start, to a page that cannot send messages to a busy kernel

_finished: collections.deque[PanelWidget] = collections.deque()


class ExecutedView(TextView):
    """For a notebook that runs without a page (papermill, nbconvert): lines of text, and the picture at the end."""

    def _write_end(self, status: Status) -> None:
        from IPython.display import display

        if self._run.history.latest() or self._run.history.figures:
            picture = Picture(self._run.history, status, self._run)
            display(picture.bundle(), raw=True)  # type: ignore[no-untyped-call]
        else:
            super()._write_end(status)


class _Source:
    """A run while it goes on; then its history and last status, without its arguments and results."""

    def __init__(self, run: Viewable) -> None:
        self.history = run.history
        self.earlier = run.earlier
        self._run: Viewable | None = run
        self._last: Status | None = None

    def status(self) -> Status:
        run = self._run
        status = self._last if run is None else run.status()
        assert status is not None
        return status

    def output(self, rank: int, position: int, limit: int) -> tuple[str, int, bool]:
        run = self._run
        return ("", position, True) if run is None else run.output(rank, position, limit)

    def stop(self) -> None:
        run = self._run
        if run is not None:
            run.stop()

    def let_go(self, status: Status) -> None:
        self._last = status
        self._run = None


class PanelView:
    """The panel in a cell's output, from the first process on.

    In JupyterLab and Notebook 7 the output is a picture, and the widget's script shows the panel in its place. A page
    that is reloaded, or opened without a kernel, then shows the last picture. Elsewhere the output is the widget's
    view, which the picture replaces at the end.
    """

    live = True

    def __init__(self, run: Viewable, *, with_output: bool = True, stays_live: bool = False) -> None:
        self._source = _Source(run)
        self._feed = Feed(self._source)
        self._figures = FiguresFeed(run.history.figures)
        self._csv = CsvParts(run.history)
        self._writer = OutputWriter() if with_output else None
        self._stays_live = stays_live
        self._place = f"nbddp-{uuid.uuid4().hex}" if is_jupyter() else ""
        self._widget: PanelWidget | None = None
        self._handle: Any = None
        self._pages: set[str] = set()
        self._closed = False
        self._lock = threading.Lock()
        self._began = self._pictured = time.monotonic()
        self._resends_due = list(_RESEND_S)
        self._heard = -1  # messages of the page that the kernel has answered "busy" to
        self._busy_due: list[float] = []

    def update(self, status: Status) -> None:
        with self._lock:  # a background run is updated by the cell that opens the view and by the run's own thread
            if self._closed:
                return
            if self._widget is None:
                status = self._open()
            frame = self._feed.frame(status)
            if frame is not None:
                self._send(frame)
            self._send_figures(over=status.over)
            self._resend_to_silent_page()
            if self._writer is not None:  # a cell waits for the run
                self._stay_busy()
            if status.over:
                self._finish(status)
            elif self._place and time.monotonic() - self._pictured >= _PICTURE_S:
                self._update_picture(status)

    def write(self, text: str) -> None:
        if self._writer is not None:
            self._writer.write(text)

    # ------------------------------------------------------------------ the page

    def _open(self) -> Status:
        """Show the panel. Returns the status that it shows."""
        from nbddp.panel.widget import PanelWidget

        status = self._source.status()  # the first import takes seconds, in which the run has gone on
        self._feed.frame(status)
        self._widget = PanelWidget(kernel_id(), self._feed.snapshot, self._place)
        self._widget.on_msg(self._on_message)
        self._handle = self._display(self._widget, status)
        return status

    def _display(self, widget: PanelWidget, status: Status) -> Any:
        """Show the widget or its place. Returns what the picture can replace it by."""
        from IPython.display import display

        # The picture beside the widget is for a page or a reader that shows no widget.
        data = ({} if self._place else widget.bundle()) | self._picture(status)
        return display(data, raw=True, display_id=True)  # type: ignore[no-untyped-call]

    def _picture(self, status: Status) -> dict[str, str]:
        if not status.over:  # nothing may ever replace this picture
            status = dataclasses.replace(status, remark=f"as of {time.strftime('%H:%M:%S')}, before the run's end")
        return Picture(self._source.history, status, self._source).bundle(self._place)

    def _update_picture(self, status: Status) -> None:
        self._handle.update(self._picture(status), raw=True)
        self._pictured = time.monotonic()

    def _send(self, message: tuple[dict[str, Any], bytes]) -> None:
        content, data = message
        assert self._widget is not None
        self._widget.send(content, buffers=[data])

    def _send_figures(self, *, over: bool) -> None:
        if message := self._figures.message(over=over):
            self._send(message)

    def _on_message(self, _widget: object, content: Any, _buffers: object) -> None:
        """Handle a message from the page. While a cell runs this is another thread, so it may only make requests."""
        assert self._widget is not None
        self._widget.heard += 1
        if content.get("kind") == "stop":
            self._source.stop()
            self._widget.stopping = True
        elif content.get("kind") == "hello":
            self._pages.add(str(content.get("page")))
            self._send(self._feed.snapshot())
            self._figures.again()
            if self._closed:
                self._send_figures(over=True)
        elif content.get("kind") == "csv":
            self._send(self._csv.part(str(content.get("request")), int(content.get("start", 0))))

    def _resend_to_silent_page(self) -> None:
        """Send snapshots unasked: ipykernel 6 receives no message during a cell, and a slow page misses frames."""
        assert self._widget is not None
        if not self._resends_due or self._widget.heard:
            return
        if time.monotonic() - self._began >= self._resends_due[0]:
            del self._resends_due[0]
            self._send(self._feed.snapshot())
            self._figures.again()

    def _stay_busy(self) -> None:
        assert self._widget is not None
        now = time.monotonic()
        if self._widget.heard != self._heard:
            self._heard = self._widget.heard
            self._busy_due = [now + later for later in _IDLE_S]
        if self._busy_due and now >= self._busy_due[0]:
            del self._busy_due[0]
            say_busy()

    def _finish(self, status: Status) -> None:
        assert self._widget is not None
        self._closed = True
        if self._writer is not None:
            self._writer.finish()
        if self._place:
            self._update_picture(status)
            _keep(self._widget)
        elif not self._stays_live:
            self._update_picture(status)
            # A reloaded page no longer knows this cell's display, so it gets no picture and must keep the panel.
            if len(self._pages) < 2:
                self._widget.leave()
        self._source.let_go(status)


class MarimoView(PanelView):
    """The panel in the output of a running cell of a marimo notebook; at the end the picture takes its place.

    marimo handles no message of the page while a cell runs, so its own interrupt button ends the run.
    """

    def _display(self, widget: PanelWidget, status: Status) -> Any:
        frontend.show_widget_in_marimo(widget)
        return _MarimoOutput()


class _MarimoOutput:
    """What IPython's handle of a display is for other front ends."""

    def update(self, data: dict[str, str], *, raw: bool) -> None:
        frontend.show_in_marimo(data["text/html"])


def _keep(widget: PanelWidget) -> None:
    """Keep a finished run's panel live. If there are too many, the oldest one's picture appears in its place."""
    _finished.append(widget)
    while len(_finished) > _KEPT:
        _finished.popleft().leave()
