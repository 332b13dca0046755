"""The live panel of a run: sends changes to the page, and replaces the panel by a picture at the end."""

from __future__ import annotations

import threading
import time
import uuid
from typing import TYPE_CHECKING, Any

from nbddp.panel.feed import Feed
from nbddp.panel.frontend import has_page, is_jupyter, kernel_id, shell
from nbddp.panel.picture import Picture
from nbddp.panel.text import OutputWriter, TextView, end_text
from nbddp.panel.view import Status, View, Viewable

if TYPE_CHECKING:
    from nbddp.panel.widget import PanelWidget

_RESEND_S = (0.3, 1.0, 2.0, 4.0, 8.0, 16.0)  # after the start, to a page that cannot send messages to a busy kernel


def view_for(run: Viewable, *, requested: bool, reopened: bool, with_output: bool) -> View:
    """The best view that the present front end can show.

    Args:
        requested: the user asked for the panel; in a notebook kernel it is then shown in any front end.
        reopened: the view is opened by ``run.show()``, and not by the run's own cell.
        with_output: show rank 0's output beside the panel.
    """
    if shell() is None:
        return TextView(run)
    if requested or has_page():
        return PanelView(run, with_output=with_output, stays_live=reopened and run.status().over)
    return ExecutedView(run)


class ExecutedView(TextView):
    """For a notebook that runs without a page (papermill, nbconvert): lines of text, and the picture at the end."""

    def _write_end(self, status: Status) -> None:
        from IPython.display import display

        if self._run.history.latest():
            picture = Picture(self._run.history, status, self._run)
            display(picture.bundle(), raw=True)  # type: ignore[no-untyped-call]
        else:
            super()._write_end(status)


class PanelView:
    """The panel in a cell's output, from the first process to the final picture."""

    live = True

    def __init__(self, run: Viewable, *, with_output: bool = True, stays_live: bool = False) -> None:
        self._run = run
        self._feed = Feed(run)
        self._writer = OutputWriter() if with_output else None
        self._stays_live = stays_live
        self._widget: PanelWidget | None = None
        self._handle: Any = None
        self._pages: set[str] = set()
        self._closed = False
        self._lock = threading.Lock()
        self._began = time.monotonic()
        self._resends_due = list(_RESEND_S)

    def update(self, status: Status) -> None:
        with self._lock:  # a background run is updated by the cell that opens the view and by the run's own thread
            if self._closed:
                return
            if self._widget is None:
                self._open(status)
            frame = self._feed.frame(status)
            if frame is not None:
                self._send(frame)
            self._resend_to_silent_page()
            if status.over and not self._stays_live:
                self._replace_by_picture(status)

    def write(self, text: str) -> None:
        if self._writer is not None:
            self._writer.write(text)

    # ------------------------------------------------------------------ the page

    def _open(self, status: Status) -> None:
        from IPython.display import display

        from nbddp.panel.widget import PanelWidget

        self._feed.frame(status)
        place = f"nbddp-{uuid.uuid4().hex}" if self._stays_live and is_jupyter() else ""
        self._widget = PanelWidget(kernel_id(), self._feed.snapshot, place)
        self._widget.on_msg(self._on_message)
        if place:
            data = Picture(self._run.history, status, self._run).bundle(place)
        else:
            data = self._widget.bundle() | {"text/plain": end_text(status, self._run.history)}
        self._handle = display(data, raw=True, display_id=True)  # type: ignore[no-untyped-call]

    def _send(self, message: tuple[dict[str, Any], bytes]) -> None:
        content, data = message
        assert self._widget is not None
        self._widget.send(content, buffers=[data])

    def _on_message(self, _widget: object, content: Any, _buffers: object) -> None:
        """Handle a message from the page. While a cell runs this is another thread, so it may only make requests."""
        assert self._widget is not None
        self._widget.heard += 1
        if content.get("kind") == "stop":
            self._run.stop()
            self._widget.stopping = True
        elif content.get("kind") == "hello":
            self._pages.add(str(content.get("page")))
            self._send(self._feed.snapshot())

    def _resend_to_silent_page(self) -> None:
        """Send snapshots unasked: ipykernel 6 receives no message during a cell, and a slow page misses frames."""
        assert self._widget is not None
        if not self._resends_due or self._widget.heard:
            return
        if time.monotonic() - self._began >= self._resends_due[0]:
            del self._resends_due[0]
            self._send(self._feed.snapshot())

    def _replace_by_picture(self, status: Status) -> None:
        assert self._widget is not None
        self._closed = True
        if self._writer is not None:
            self._writer.finish()
        self._handle.update(Picture(self._run.history, status, self._run).bundle(), raw=True)
        # A reloaded page no longer knows this cell's display, so it gets no picture and must keep the panel.
        if len(self._pages) < 2:
            self._widget.leave()
