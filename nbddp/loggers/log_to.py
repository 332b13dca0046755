"""Sends a run's points to where people keep them: ``run(log_to=writer)``."""

import threading
import types
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from nbddp.errors import LaunchError
from nbddp.history.recording import Recording
from nbddp.text import in_a_line, short

_EVERY_S = 1.0
_END_S = 10.0  # for the rest, when the run is over
_Row = tuple[int, float, dict[str, float]]  # step, unix time, metrics
_KINDS = "a SummaryWriter, a W&B run, a logger with log_metrics(metrics, step), or a function f(step, metrics)"


class Destination(NamedTuple):
    """What takes a step's metrics, and what makes it write them."""

    name: str
    send: Callable[[int, float, dict[str, float]], object]
    flush: Callable[[], object]


def destinations(to: Any) -> list[Destination]:
    """Return those that ``log_to=`` names. Raises LaunchError if one takes no metrics."""
    return [_destination(each) for each in (to if isinstance(to, (list, tuple)) else [to]) if to is not None]


def _destination(to: Any) -> Destination:
    name, flush = getattr(to, "__name__", type(to).__name__), getattr(to, "flush", lambda: None)
    if not isinstance(to, (type, types.ModuleType)):  # mlflow's functions log into the present thread's run
        if add := getattr(to, "add_scalar", None):
            return Destination(name, lambda step, at, row: [add(*it, step, walltime=at) for it in row.items()], flush)
        if hasattr(to, "define_metric"):  # W&B: its own steps may only grow, so ours is a metric
            to.define_metric("*", step_metric="step")
            return Destination(name, lambda step, at, row: to.log({**row, "step": step, "_timestamp": at}), flush)
        if hasattr(to, "log_metrics"):  # Lightning's loggers have save()
            return Destination(name, lambda step, at, row: to.log_metrics(row, step=step), getattr(to, "save", flush))
        if callable(to):
            return Destination(name, lambda step, at, row: to(step, row), flush)
    raise LaunchError(f"log_to={short(to)} can't take metrics. Pass {_KINDS}")


class Sender:
    """Sends what is new, once a second. A destination that raises gets no more, and the run goes on."""

    def __init__(self, recording: Recording, to: Sequence[Destination]) -> None:
        self._recording, self._to = recording, [*to]
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work, name="nbddp-log-to", daemon=True)
        if to:
            self._thread.start()

    def finish(self) -> None:
        """The run is over: wait until everything has been sent, but not longer than ten seconds; and only once."""
        if self._to and not self._over.is_set():
            self._over.set()
            self._thread.join(_END_S)
            if self._thread.is_alive():
                names = ", ".join(each.name for each in self._to)
                _warn(f"{names} didn't take all metrics within {_END_S:g} s; sending continues in the background")

    def _work(self) -> None:
        over = False
        while self._to and not over:
            over = self._over.wait(_EVERY_S)
            rows = self._rows()
            for each in self._to.copy() if rows else ():
                try:
                    for row in rows:
                        each.send(*row)
                    each.flush()
                except Exception as error:  # whatever the user's object raises
                    self._to.remove(each)
                    text = f"{each.name} gets no more metrics: {in_a_line(error)}"
                    _warn(f"{text}. The run continues, and run.history has all of them")

    def _rows(self) -> list[_Row]:
        rows: list[_Row] = []
        at_step: dict[int, dict[str, float]] = {}
        for name, points in self._recording.take().items():
            for step, at, value in zip(*(column.tolist() for column in points[:3])):
                row = at_step.get(step)
                if row is None or name in row:  # the step comes again in the next epoch, or after a restart
                    row = at_step[step] = {}
                    rows.append((step, at, row))
                row[name] = value
        return sorted(rows, key=lambda row: row[1])


def _warn(text: str) -> None:
    warnings.warn_explicit(text, UserWarning, "log_to", 1)  # warn() would show a text only once per notebook
