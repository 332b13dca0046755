"""Shows one run: opens its views and updates them until the run ends."""

from __future__ import annotations

from nbddp.kernel.prompt import Prompt
from nbddp.kernel.supervisor import Supervisor
from nbddp.kernel.viewable import ViewableRun
from nbddp.latch import start_thread
from nbddp.panel.card import Card
from nbddp.panel.choose import view_for
from nbddp.panel.frontend import cell_number
from nbddp.panel.picture import Picture
from nbddp.panel.text import OutputWriter
from nbddp.panel.view import View

_REDRAW_S = 0.2
_SHORT_S = 0.3


class RunViews:
    """The views of one run."""

    def __init__(self, name: str, viewable: ViewableRun, supervisor: Supervisor, *, blocking: bool) -> None:
        self._name = name
        self._viewable = viewable
        self._supervisor = supervisor
        self._state = supervisor.state
        self._blocking = blocking
        self._views: list[View] = []
        self._followed = False  # by a thread of its own
        self._prompt = Prompt(supervisor, viewable.stop)
        self._cell: int | None = None  # the last one that a view was opened in

    def open(self, *, show: bool | str | None = None, again: bool = False) -> None:
        """Open a view in the calling cell; :meth:`follow` updates it."""
        self._cell = cell_number()
        view = view_for(self._viewable, show=show, reopened=again, with_output=self._blocking and not again)
        view.update(self._viewable.status())
        self._views.append(view)
        if again and self._state.done.is_open:
            view.update(self._viewable.status())  # the run may have ended between the two lines above
            return
        if not self._blocking and view.live and not self._followed:
            # No cell waits for this run, so the panel needs a thread, which ends with the run.
            self._followed = True
            # If the system refuses a thread, the panel is not updated, and the run goes on.
            start_thread(self.follow, f"nbddp-panel-{self._name}", lambda _: None)

    def open_unless_short(self) -> None:
        """Open a view, unless the run is over within a moment and has nothing to show but its output.

        So a session's ``x = 1`` looks like any other cell.
        """
        try:
            over = self._supervisor.join(_SHORT_S, self._state.dialog.has_stops)
        except KeyboardInterrupt:
            self.open()  # it shows how the run is stopped
            raise
        history = self._viewable.history
        if not over or self._state.phase != "finished" or history.names or history.figures:
            return self.open()
        writer = OutputWriter()
        if notice := self._viewable.status().notice:
            writer.line(f"[{notice}]")
        while output := self._state.outputs[0].take():
            writer.write(output)
        return writer.finish()

    def follow(self) -> None:
        """Update the views until the end. For a blocking run this is the cell's thread: every front end shows that."""
        if self._blocking:
            while not self._supervisor.join(_REDRAW_S if self._views else None, self._state.dialog.has_news):
                self.update()
                self._prompt.serve(self.update)
        else:  # the cell of %ddp debug, if any, serves the prompt
            while not self._supervisor.join(_REDRAW_S if self._views else None):
                self.update()
        self.update()

    def debug(self, rank: int) -> None:
        """Open the debugger on this rank of a background run, under the calling cell."""
        self._prompt.look(rank)

    def update(self) -> None:
        """Update all views, and write the new output of rank 0 beside those of a blocking run."""
        if not self._views:
            return
        output = ""
        if self._blocking and self._state.outputs:
            output = self._state.outputs[0].take()
        status = self._viewable.status()
        for view in list(self._views):
            view.write(output)
            view.update(status)

    def html(self) -> str | None:
        """Return the picture of the run as HTML; None in the cell that shows the run anyway, and without a metric."""
        history = self._viewable.history
        if not (history.names or history.figures) or (self._cell is not None and self._cell == cell_number()):
            return None
        return Picture(history, self._viewable.status(), self._viewable).bundle()["text/html"]

    def card(self, *, dark: bool) -> Card:
        """Return the picture of the run for sharing."""
        return Card(self._viewable.history, self._viewable.status(), dark=dark)

    def show_the_end(self) -> None:
        """Update the views of a background run: no thread updates lines of text, and a thread may come too late.

        A program that executes the notebook takes in a display's update only while a cell runs.
        """
        if not self._blocking:
            self.update()
