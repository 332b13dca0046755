"""One line that says what a cell waits for, rewritten in place in a notebook and in a terminal."""

from __future__ import annotations

import time
from typing import Any

from nbddp.panel import frontend, terminal
from nbddp.panel.text import OutputWriter

_INTERVAL_S = 1.0
_LINE_INTERVAL_S = 10.0  # between two equal lines where none can be rewritten


class WaitingLine:
    """The line of one wait. Where it cannot be rewritten, it is written again when it says something else."""

    def __init__(self) -> None:
        self._writer = OutputWriter()
        self._handle: Any = None
        self._shown = ""
        self._next_at = 0.0

    def show(self, what: str, took: str, reason: str) -> None:
        """Show what is waited for, how long it has taken, and why, if that is known: often, this is cheap."""
        now = time.monotonic()
        rewrites = self._writer.width is not None or self._has_page()
        if now < self._next_at and (rewrites or reason == self._shown):
            return
        self._shown, self._next_at = reason, now + (_INTERVAL_S if rewrites else _LINE_INTERVAL_S)
        self._put(f"waiting for {what}, {took}{': ' * bool(reason)}{reason}")

    def end(self, what: str, took: str) -> None:
        """Replace the line by what was waited for; nothing if no line was shown, or none can be replaced."""
        if self._handle is not None:
            self._display(f"{what}, after {took}")
        elif self._writer.width is not None:
            self._writer.bottom_line("")

    def _put(self, text: str) -> None:
        if (columns := self._writer.width) is not None:
            self._writer.bottom_line(terminal.fitted([text], columns))
        elif self._has_page():
            self._display(f"{text} · ■ cancels the request")
        else:
            self._writer.line(text)

    def _has_page(self) -> bool:
        """Whether somebody may look at a cell of a notebook."""
        return frontend.shell() is not None and not frontend.is_executed()

    def _display(self, text: str) -> None:
        from IPython.display import display

        data = {"text/plain": text}
        if self._handle is None:
            self._handle = display(data, raw=True, display_id=True)  # type: ignore[no-untyped-call]
        else:
            self._handle.update(data, raw=True)
