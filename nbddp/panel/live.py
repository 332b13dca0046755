"""Kernel side. The live panel of a run: what changed goes to the page, at the end a picture takes its place."""

from __future__ import annotations

import threading
import time
import uuid
from typing import TYPE_CHECKING, Any

from nbddp.kernel.history import History
from nbddp.panel.feed import Feed
from nbddp.panel.frontend import finds_its_picture, has_page, kernel_id, shell
from nbddp.panel.picture import Picture
from nbddp.panel.text import Echo, TextView, end_text
from nbddp.panel.view import Source, Status, View

if TYPE_CHECKING:
    from nbddp.panel.widget import PanelWidget

_SOON_S = (0.3, 1.0, 2.0, 4.0, 8.0, 16.0)  # to a page that cannot answer: it may have missed the first frames


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
