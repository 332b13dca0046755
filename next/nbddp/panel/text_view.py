"""A run as lines of text, where no HTML can be shown: a terminal, a script, a notebook that a program executes."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

from nbddp.history.history import History
from nbddp.panel import numbers
from nbddp.panel.run_progress import progress
from nbddp.panel.status import Source, Status
from nbddp.text import duration, write_line

_EVERY_S = 2.0
_MAX_METRICS = 8


class TextView:
    """At most every two seconds a line about the progress, and one at the end.

    A run that is over within a moment, and has nothing to show but its output, looks like any call.
    """

    def __init__(self, source: Source, clock: Callable[[], float] = time.monotonic) -> None:
        self._source, self._clock = source, clock
        self._said = self._hang = ""
        self._restarts = 0
        self._over = False
        self._due = clock() + _EVERY_S

    def update(self) -> None:
        status = self._source.status()
        if status.restarts > self._restarts:
            self._restarts = status.restarts
            self._say(f"{status.name}: {restarted(status, self._source.history)}")
        if status.hang != self._hang:
            self._hang = status.hang
            if status.hang:
                self._say(status.hang)
        if status.over:
            if not self._over and (self._said or self._source.history.latest()):
                self._write_end(status)
        elif self._clock() >= self._due:
            line = f"{status.name}: {progress_line(self._source.history)}"
            if line not in (self._said, f"{status.name}: "):
                self._say(line)
        self._over = status.over

    def _say(self, line: str) -> None:
        self._said, self._due = line, self._clock() + _EVERY_S
        write_line(line)

    def _write_end(self, status: Status) -> None:
        write_line(end_line(self._source.history, dataclasses.replace(status, error="")))  # which is raised


def restarted(status: Status, history: History) -> str:
    """``restarted 1 of 2 after RankDied: rank 2 of 4 was killed by SIGKILL``"""
    return f"restarted {status.restarts} of {status.max_restarts} after {history.restarts[-1].reason}"


def progress_line(history: History) -> str:
    """``epoch 3/5 · step 266/590 · 0:42 left · loss 0.412``"""
    now = progress(history)
    parts = [f"{name.lower()} {done:,}" + (f"/{total:,}" if total else "") for name, done, total in now.loops]
    parts += [f"step {now.step:,}"] if not parts and now.step is not None else []
    return " · ".join([*parts, *([f"{duration(now.left)} left"] if now.left is not None else []), *_metrics(history)])


def end_line(history: History, status: Status) -> str:
    """``train: finished after 0:38 · 4 processes · nccl · loss 0.412``"""
    start = f"{status.name}: {status.state} after {duration(status.seconds)}"
    return " · ".join([start, status.summary, *_metrics(history), *filter(None, [status.error])])


def _metrics(history: History) -> list[str]:
    latest = list(history.latest().items())
    more = [f"and {len(latest) - _MAX_METRICS} more"] if len(latest) > _MAX_METRICS else []
    return [f"{name} {numbers.metric(value)}" for name, value in latest[:_MAX_METRICS]] + more
