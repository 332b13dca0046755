"""Kernel side. A run as short lines of text, for where no widget can be shown."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO

from nbddp.kernel.history import Bar, History
from nbddp.panel import summary
from nbddp.panel.summary import counts_rounds, hang_lines, plain, restart_count, restart_text, seconds_left
from nbddp.panel.view import Status
from nbddp.wire import fold

LINE_EVERY_S = 2.0
_METRICS = 8  # in one line
_NAME_CHARS = 60
_FEW_ROUNDS = 50  # deserve a line each however fast they are
_SLOW_ROUND_S = 0.5
_HANG_CHARS = 16 << 10
OUTPUT_LIMIT = 512 << 10  # bytes of rank 0's output in one cell; the whole is in run.logs(0)


class Echo:
    """Rank 0's output and lines of our own in one stream, each beginning on a line of its own."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream
        self._written = 0
        self._at_line_start = True
        self._rewritten = ""  # a last line with carriage returns, which may change once more

    def write(self, text: str) -> None:
        """Output as it comes, folded, up to a limit."""
        text, self._rewritten = _settled(self._rewritten + text, shown=not self._at_line_start)
        if not text or self._written >= OUTPUT_LIMIT:
            return
        text = text[: OUTPUT_LIMIT - self._written]
        self._written += len(text)
        self._put(text)
        if self._written >= OUTPUT_LIMIT:
            self.line("[more output is not shown here; run.logs(0) has it]")

    def finish(self) -> None:
        """Nothing more comes: a line that might have been rewritten stands."""
        if self._rewritten:
            self.write("\n")

    def line(self, line: str) -> None:
        self._put(("" if self._at_line_start else "\n") + plain(line) + "\n")

    def _put(self, text: str) -> None:
        stream = self._stream or sys.stdout
        stream.write(text)
        stream.flush()
        self._at_line_start = text.endswith("\n")


class TextView:
    """Lines of text: when the state changes, on a restart, when nothing moves, and on progress.

    Of progress one per finished epoch, else at most one every two seconds.
    """

    live = False  # another cell's output is no place for it

    def __init__(self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._echo = Echo(stream)
        self._clock = clock
        self._state = ""
        self._said = ""
        self._said_at = float("-inf")
        self._epoch = 0
        self._restarts = 0
        self._hangs = False

    def update(self, status: Status, history: History) -> None:
        self._say_restart(status)
        self._say_hang(status)
        if status.state != self._state:
            self._state = status.state
            self._say_state(status, history)
        elif status.state == "running":
            self._say_progress(history)

    def write(self, text: str) -> None:
        self._echo.write(text)

    def _say_restart(self, status: Status) -> None:
        if status.restarts > self._restarts:
            self._restarts, self._epoch = status.restarts, 0
            if not status.blocking:  # else rank 0's output, which is shown here, has the line
                self._echo.line(f"{status.name}: {restart_text(status)}")

    def _say_hang(self, status: Status) -> None:
        if status.hang and not self._hangs:
            first, *rest = hang_lines(status, _HANG_CHARS)
            for line in (f"{status.name}: {first}", *rest):
                self._echo.line(line)
        self._hangs = bool(status.hang)

    def _say_state(self, status: Status, history: History) -> None:
        if status.state == "starting":
            if status.restarts:
                return  # that it starts again has been said
            self._echo.line(status.notice or f"{status.name}: {status.summary}")
        elif status.state == "running":
            self._said_at = self._clock()
        else:
            self._echo.finish()
            self._say_end(status, history)

    def _say_end(self, status: Status, history: History) -> None:
        for text in summary.notices(history):
            self._echo.line(f"{status.name}: {text}")
        self._echo.line(end_text(status, history))
        if status.remark:
            self._echo.line(f"{status.name}: {status.remark}")

    def _say_progress(self, history: History) -> None:
        bars = history.ranks[0].bars
        epoch = bars[0].done if len(bars) > 1 or (bars and _has_slow_rounds(bars[0])) else 0
        due = self._clock() - self._said_at >= LINE_EVERY_S
        if not due and epoch <= self._epoch:
            return
        line = " · ".join(progress_text(history) + metrics_text(history))
        if not line or line == self._said:
            return
        self._epoch = epoch
        self._said, self._said_at = line, self._clock()
        self._echo.line(line)


def progress_text(history: History) -> list[str]:
    """``["epoch 2/5", "step 30/118", "0:42 left"]``, as far as it is known."""
    rank = history.ranks[0]
    parts = [_bar_text(bar) for bar in rank.bars]
    if not parts and rank.step >= 0:
        parts = [f"step {rank.step:,}"]
    left = seconds_left(rank.bars)
    if left is not None:
        parts.append(f"{duration(left)} left")
    return parts


def end_text(status: Status, history: History) -> str:
    """``train: finished after 0:38 · 4 processes · nccl · 1 restart · loss 0.412``."""
    where = summary.on_host(status, status.failed_rank)
    state = f"{status.name}: {status.state}{f' ({where})' if where else ''} after {duration(status.seconds)}"
    parts = [state, status.summary, restart_count(status)]
    return plain(" · ".join([*filter(None, parts), *metrics_text(history)]))


def metrics_text(history: History) -> list[str]:
    """``["loss 0.412", "val/acc 0.97"]``, a few of them."""
    latest = history.latest()
    parts = [f"{name[:_NAME_CHARS]} {latest[name]:.4g}" for name in list(latest)[:_METRICS]]
    return [*parts, f"… and {len(latest) - _METRICS:,} more"] if len(latest) > _METRICS else parts


def duration(seconds: float) -> str:
    """``3.2 s``, ``1:02`` or ``2:03:04``."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def _settled(text: str, *, shown: bool) -> tuple[str, str]:
    """Output split into what will not change any more, folded, and a last line that may be rewritten.

    Args:
        shown: is the first line's beginning? If that line is rewritten, it goes back to its start.
    """
    whole, newline, last = text.rpartition("\n")
    back = "\r" if shown and "\r" in whole.partition("\n")[0].rstrip("\r") else ""
    settled = back + fold(whole + newline)
    if "\r" in last:
        return settled, _last_state(last)
    return settled + last, ""


def _last_state(line: str) -> str:
    """The line from the carriage return on that counts: a bar may go on for days."""
    return line[max(0, line.rstrip("\r").rfind("\r")) :]


def _has_slow_rounds(bar: Bar) -> bool:
    few = bar.total is not None and bar.total <= _FEW_ROUNDS
    return counts_rounds(bar) and (few or (bar.rate is not None and bar.rate * _SLOW_ROUND_S <= 1))


def _bar_text(bar: Bar) -> str:
    total = f"/{bar.total:,}" if bar.total is not None else ""
    return f"{bar.desc[:_NAME_CHARS] or 'step'} {bar.done:,}{total}"
