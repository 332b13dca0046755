"""Shows a run as lines of text where no widget can be shown."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO

from nbddp.history.history import Bar, History
from nbddp.panel import figures, frontend, numbers, ranks, summary, terminal
from nbddp.panel.summary import counts_epochs, hang_lines, plain, restart_count, restart_text, slowest
from nbddp.panel.view import Status, Viewable
from nbddp.shown import Shown
from nbddp.text import duration, fold

_LINE_INTERVAL_S = 2.0
_LONG_WAIT_S = 1.0
_REWRITE_INTERVAL_S = 0.4  # of the line that a terminal rewrites
_MAX_METRICS = 8  # in one line
_NAME_CHARS = 60
_FEW_EPOCHS = 50  # get a line each, however fast they are
_SLOW_EPOCH_S = 0.5
_HANG_CHARS = 16 << 10
_MAX_OUTPUT_CHARS = 512 << 10  # of rank 0's output in one cell; run.logs(0) has all of it


class OutputWriter:
    """Writes rank 0's output and nbddp's own lines to one stream; each of nbddp's lines starts on a new line.

    In a terminal, one more line can be below all that: :meth:`bottom_line` rewrites it in place.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream
        self._written = 0
        self._at_line_start = True
        self._rewritable = ""  # a last line with carriage returns, which may change again
        self._bottom = ""  # the line below the output
        self._bottom_is_drawn = False

    @property
    def width(self) -> int | None:
        """The terminal's width in character cells; None if the stream is not a terminal."""
        return terminal.width(self._stream or sys.stdout)

    def write(self, text: str) -> None:
        """Write rank 0's output, folded, up to a limit."""
        text, self._rewritable = _settled(self._rewritable + text, shown=not self._at_line_start)
        if not text or self._written >= _MAX_OUTPUT_CHARS:
            return
        text = text[: _MAX_OUTPUT_CHARS - self._written]
        self._written += len(text)
        self._put(text)
        if self._written >= _MAX_OUTPUT_CHARS:
            self.line("[more output is not shown here; run.logs(0) has it]")

    def finish(self) -> None:
        """The output is complete: write a last line that was held back because it might be rewritten."""
        if self._rewritable:
            self.write("\n")

    def line(self, line: str) -> None:
        """Write a line of nbddp's own."""
        self._put(("" if self._at_line_start else "\n") + plain(line) + "\n")

    def bottom_line(self, line: str) -> None:
        """Show this line below the output, in place of the one before; "" removes it. Needs a terminal."""
        line = plain(line)
        if line != self._bottom:
            self._bottom = line
            self._put("")

    def _put(self, text: str) -> None:
        """Write, with the bottom line out of the way; it comes back below, unless the output's line goes on."""
        stream = self._stream or sys.stdout
        self._at_line_start = text.endswith("\n") if text else self._at_line_start
        erased = terminal.ERASE_LINE if self._bottom_is_drawn else ""
        self._bottom_is_drawn = bool(self._bottom) and self._at_line_start
        stream.write(erased + text + (self._bottom if self._bottom_is_drawn else ""))
        stream.flush()


class TextView:
    """Writes a line when the state changes, on a restart, when the ranks hang, and on progress.

    Progress is one line per finished epoch, otherwise at most one line every 2 s. In a terminal it is one line that is
    rewritten in place, cut to the terminal's width, with a small curve of the first metric.
    """

    live = False  # without a cell that waits, lines would end up in the output of another cell

    def __init__(
        self, run: Viewable, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._run = run
        self._writer = OutputWriter(stream)
        self._clock = clock
        self._state = ""
        self._last_line = ""
        self._last_line_at = float("-inf")
        self._epoch = 0
        self._restarts = 0
        self._hangs = False
        self._figures: dict[str, Shown] = {}  # the newest of each name, as far as there is a line about it
        self._figures_at = float("-inf")
        self._waits = False  # has been written, where it is a line of its own

    def update(self, status: Status) -> None:
        if status.restarts > self._restarts:
            self._restarts, self._epoch = status.restarts, 0
            if not status.blocking:  # a blocking run's view shows rank 0's output, which has this line already
                self._writer.line(f"{status.name}: {restart_text(status)}")
        if status.hang and not self._hangs:
            first, *rest = hang_lines(status, _HANG_CHARS)
            for line in (f"{status.name}: {first}", *rest):
                self._writer.line(line)
        self._hangs = bool(status.hang)
        self._write_figures(status)
        if status.state != self._state:
            self._state = status.state
            self._write_state(status)
        elif status.state == "running" and self._writer.width is not None:
            self._rewrite_progress(status, self._writer.width)
        elif status.state == "running":
            self._write_progress()
        elif status.state == "starting" and status.waits_for:
            self._write_wait(f"{status.name}: {status.waits_for}", status.seconds)

    def _write_figures(self, status: Status) -> None:
        """A line for each figure that is new: nothing more can be shown here."""
        if not status.over and self._clock() - self._figures_at < _LINE_INTERVAL_S:
            return
        newest = figures.newest(self._run.history.figures)
        for name, shown in newest.items():
            if self._figures.get(name) is not shown:
                self._figures_at = self._clock()
                self._writer.line(f"{status.name}: {figures.line(shown)}")
        self._figures = newest

    def _write_wait(self, line: str, seconds: float) -> None:
        """Say what the start waits for, if somebody may read it meanwhile: not in a file, or an executed notebook."""
        if (columns := self._writer.width) is not None:
            self._writer.bottom_line(terminal.fitted([line], columns))
        elif seconds >= _LONG_WAIT_S and not self._waits and frontend.shell() and not frontend.is_executed():
            self._waits = True
            self._writer.line(line)

    def write(self, text: str) -> None:
        self._writer.write(text)

    def _write_state(self, status: Status) -> None:
        if status.state == "starting":
            if not status.restarts:  # a restart has its own line
                where = status.summary.removesuffix(f" · {status.waits_for}")
                self._writer.line(status.notice or f"{status.name}: {where}")
        elif status.state == "running":
            self._last_line_at = self._clock()
            self._writer.bottom_line("")
        else:
            self._writer.finish()
            self._write_end(status)

    def _write_end(self, status: Status) -> None:
        self._writer.bottom_line("")
        for text in summary.notices(self._run.history):
            self._writer.line(f"{status.name}: {text}")
        columns = self._writer.width
        end = end_parts(status, self._run.history)
        self._writer.line(" · ".join(end) if columns is None else self._fitted(end, columns))
        if status.remark:
            self._writer.line(f"{status.name}: {status.remark}")

    def _rewrite_progress(self, status: Status, columns: int) -> None:
        if any(rank.debugger for rank in status.ranks):
            self._writer.bottom_line("")  # the debugger's prompt is there
        elif self._clock() - self._last_line_at >= _REWRITE_INTERVAL_S:
            self._last_line_at = self._clock()
            history = self._run.history
            parts = [f"{status.name}: {duration(status.seconds)}", *progress_text(history), *metrics_text(history)]
            self._writer.bottom_line(self._fitted(parts, columns))

    def _fitted(self, parts: list[str], columns: int) -> str:
        """The parts cut to the terminal's width, with a small curve of the first metric if there is space for it."""
        history = self._run.history
        first = next(iter(metrics_text(history)), None)
        if first in parts and (curve := terminal.sparkline(history[next(iter(history.latest()))].values)):
            text = terminal.fitted([f"{part} {curve}" if part == first else part for part in parts], columns)
            if curve in text:
                return text
        return terminal.fitted(parts, columns)

    def _write_progress(self) -> None:
        history = self._run.history
        bars = slowest(history).bars
        epoch = bars[0].done if len(bars) > 1 or (bars and _has_slow_epochs(bars[0])) else 0
        due = self._clock() - self._last_line_at >= _LINE_INTERVAL_S
        if not due and epoch <= self._epoch:
            return
        line = " · ".join(progress_text(history) + metrics_text(history))
        if not line or line == self._last_line:
            return
        self._epoch = epoch
        self._last_line, self._last_line_at = line, self._clock()
        self._writer.line(line)


def progress_text(history: History) -> list[str]:
    """``["epoch 3/5", "step 266/590", "0:42 left"]``, as far as these are known; the same numbers as in the panel."""
    now = summary.progress(history)
    loops = [(now.outer_label, now.outer, now.outers), (now.step_label, now.step, now.steps)]
    parts = [_count_text(label, done, total) for label, done, total in loops if done is not None]
    return [*parts, f"{duration(now.left)} left"] if now.left is not None else parts


def _count_text(label: str, done: int, total: int | None) -> str:
    name = label[:1].lower() + label[1:_NAME_CHARS]
    return f"{name} {done:,}" + (f"/{total:,}" if total is not None else "")


def end_text(status: Status, history: History) -> str:
    """``train: finished after 0:38 · 4 processes · nccl · 1 restart · loss 0.412``."""
    return plain(" · ".join(end_parts(status, history)))


def end_parts(status: Status, history: History) -> list[str]:
    """The parts of :func:`end_text`."""
    where = ranks.on_host(status, status.failed_rank)
    state = f"{status.name}: {status.state}{f' ({where})' if where else ''} after {duration(status.seconds)}"
    parts = [state, status.summary, restart_count(status)]
    return [*filter(None, parts), *metrics_text(history)]


def metrics_text(history: History) -> list[str]:
    """``["loss 0.412", "val/acc 0.97"]``, at most 8 metrics."""
    latest = history.latest()
    parts = [f"{name[:_NAME_CHARS]} {numbers.metric(latest[name])}" for name in list(latest)[:_MAX_METRICS]]
    return [*parts, f"… and {len(latest) - _MAX_METRICS:,} more"] if len(latest) > _MAX_METRICS else parts


def _settled(text: str, *, shown: bool) -> tuple[str, str]:
    """Split output into the part that will not change any more, folded, and a last line that may be rewritten.

    Args:
        shown: the beginning of the first line has been shown, so that rewriting it takes a carriage return.
    """
    whole, newline, last = text.rpartition("\n")
    back = "\r" if shown and "\r" in whole.partition("\n")[0].rstrip("\r") else ""
    settled = back + fold(whole + newline)
    if "\r" not in last:
        return settled + last, ""
    # Only the last state of the line is kept: a progress bar may rewrite its line for days.
    return settled, last[max(0, last.rstrip("\r").rfind("\r")) :]


def _has_slow_epochs(bar: Bar) -> bool:
    few = bar.total is not None and bar.total <= _FEW_EPOCHS
    return counts_epochs(bar) and (few or (bar.rate is not None and bar.rate * _SLOW_EPOCH_S <= 1))
