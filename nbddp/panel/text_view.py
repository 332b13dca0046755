"""A run as lines of text, where no HTML can be shown: a terminal, a script, a notebook that a program executes."""

import dataclasses
import math
import threading
import time
from collections.abc import Callable

from nbddp.history.history import History
from nbddp.panel import frontend, numbers
from nbddp.panel.run_progress import notices, progress
from nbddp.panel.status import Source, Status
from nbddp.text import cut, duration, plain, write_line

_EVERY_S = 2.0
_MAX_METRICS, _NAME_CHARS = 8, 60


class TextView:
    """At most every two seconds a line about the progress, and one at the end.

    A run that's over within a moment, and has nothing to show but its output, looks like any call.

    Attributes:
        cell: the number of the one that shows the end; None in a terminal or a script.
    """

    def __init__(self, source: Source, clock: Callable[[], float] = time.monotonic) -> None:
        self._source: Source | None = source
        self._clock = clock
        self._thread = threading.get_ident()
        self.cell = frontend.cell_number()
        self._said = self._state = ""
        self._hangs = False
        self._restarts = source.status().restarts
        self._due = math.inf  # while it's starting

    def update(self) -> None:
        if threading.get_ident() != self._thread or (source := self._source) is None:
            return  # it follows a run in the background: these lines would come in another cell
        status, history = source.status(), source.history
        before, self._state = self._state, status.state
        if self._due == math.inf and status.state == "running":
            self._due = self._clock() + _EVERY_S
        if status.restarts > self._restarts:
            self._restarts = status.restarts
            self._say(status, restarted(status, history))
        if status.hang and not self._hangs:
            self._say(status, status.hang)
        self._hangs = bool(status.hang)
        if status.over:
            self._source = None
            short = self._clock() < self._due if self._due < math.inf else status.seconds < _EVERY_S
            if not (before and short and not self._said and not history.latest() and not status.remark):
                self._write_end(source, status)
        elif self._clock() >= self._due and (line := progress_line(history)) not in ("", self._said):
            self._say(status, line)

    def _say(self, status: Status, text: str) -> None:
        self._said, self._due = text, self._clock() + _EVERY_S
        for line in f"{status.name}: {text}".splitlines():
            write_line(plain(line))

    def _write_end(self, source: Source, status: Status) -> None:
        self.cell = frontend.cell_number()  # of a run in the background, the one that waits
        for text in notices(source.history):
            self._say(status, text)
        write_line(end_line(source.history, dataclasses.replace(status, error="")))  # which is raised
        if status.remark:
            self._say(status, status.remark)


def restarted(status: Status, history: History) -> str:
    """``restart 1 of 2 after RankDied: rank 2 of 4 was killed by SIGKILL``"""
    return f"restart {status.restarts} of {status.max_restarts} after {history.restarts[-1].reason}"


def progress_line(history: History) -> str:
    """``epoch 3/5 · step 266/590 · 0:42 left · loss 0.412``"""
    now = progress(history)
    loops = now.loops + ([("step", now.step, now.steps)] if now.step is not None else [])
    parts = [_count(*loop) for loop in loops]
    parts += [f"{cut(name, _NAME_CHARS)} {cut(text, _NAME_CHARS)}" for name, text in now.postfix.items()]
    parts += [f"{duration(now.left)} left"] if now.left is not None else []
    return " · ".join([*parts, *_metrics(history)])


def end_line(history: History, status: Status) -> str:
    """``train: finished after 0:38 · 4 ranks · nccl · 1 restart · loss 0.412``"""
    restarts = f"{status.restarts} restart{'s' * (status.restarts > 1)}" if status.restarts else ""
    parts = [f"{status.name}: {status.state} after {duration(status.seconds)}", status.summary, restarts]
    return plain(" · ".join(filter(None, [*parts, *_metrics(history), status.error])))


def _count(name: str, done: int, total: int | None) -> str:
    return f"{cut(name[:1].lower() + name[1:], _NAME_CHARS)} {done:,}" + (f"/{total:,}" if total else "")


def _metrics(history: History) -> list[str]:
    latest = list(history.latest().items())
    more = [f"and {len(latest) - _MAX_METRICS:,} more"] if len(latest) > _MAX_METRICS else []
    return [f"{cut(name, _NAME_CHARS)} {numbers.metric(value)}" for name, value in latest[:_MAX_METRICS]] + more
