"""``log`` and ``progress`` send numbers to the notebook; this module holds the rank's pipe that they write to."""

from __future__ import annotations

import collections
import contextlib
import os
import stat
import time
from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Any, TypeVar

from nbddp import wire
from nbddp.listening.curves import Curves
from nbddp.listening.libraries import listen_to_libraries
from nbddp.shown import Shown
from nbddp.worker.metric_values import FIRST_STEP, LAST_STEP, check_value, checked_step, checked_weight
from nbddp.worker.metrics_pipe import MetricsFile, MetricsPipe

T = TypeVar("T")

_PROGRESS_EVERY_S = 0.1
_DESC_CHARS = 120  # longest description of progress(), which is shown in one line
_DEFAULT_WEIGHT = 1
_MAX_INT_WEIGHT = 2**53  # integers up to here are exact as floats
_OPS = wire.REDUCE_OPS

_pipe: MetricsPipe | None = None
_open_bars = 0
_curves: Curves | None = None  # of what other libraries log
_shown: collections.Counter[str] = collections.Counter()  # images by name, of those without a step


def log(
    values: Mapping[str, Any] | None = None,
    /,
    *,
    step: int | None = None,
    reduce: str | None = None,
    weight: float = 1,
    **metrics: Any,
) -> None:
    """Send metrics to the notebook: ``log(loss=loss, acc=acc)``, ``log({"val/loss": v})``.

    Never waits: not for the GPU (device tensors are copied asynchronously), not for the other ranks
    (it is not a collective), not for the notebook. Outside a run it only checks its arguments.

    Args:
        values: metrics whose names are not Python identifiers, e.g. ``"val/loss"``.
        step: the x value of these points, an integer. By default steps are counted: a metric logged a second time
            begins a new step, so a ``val/acc`` logged after the 100th ``loss`` gets that ``loss``'s step.
            After ``load_snapshot`` counting continues from where the snapshot was saved.
        reduce: ``"mean"``, ``"sum"``, ``"min"`` or ``"max"`` over all ranks, combined in the notebook once
            every rank has logged its value. Without ``step=``, the n-th value of a metric on one rank is combined
            with the n-th on the others, whatever else they log; with ``step=``, values of the same step are combined.
            Pass ``step=`` if some ranks log a metric less often than others. ``run.history.notices`` lists steps
            that some ranks never logged: their mean, minimum or maximum is over the other ranks, and a sum leaves
            them out. The first ``reduce`` of a metric counts for the whole run. By default a metric has rank 0's
            values.
        weight: this rank's weight in a ``"mean"``, e.g. the size of an uneven last batch; at least 0.
        **metrics: numbers, or tensors with one element, on any device. The first 1,000 names of a run are kept.

    Raises:
        TypeError: a metric has no name or its name is not a string, a value or weight is not a number, or a step is
            not an integer.
        ValueError: a tensor or array has several elements, ``reduce`` is unknown, a weight is negative or not finite,
            or a step does not fit into 64 bits. If a call raises, it logs nothing.
    """
    if values is not None:
        try:
            metrics = {**values, **metrics}
        except TypeError:
            raise TypeError(
                "log() takes metrics by name, log(loss=0.5) or log({'val/loss': 0.5}), "
                f"not a bare {type(values).__name__}"
            ) from None
        for name in metrics:
            if type(name) is not str:
                raise TypeError(f"the name of a metric must be a string, not {name!r}")
    try:
        op = _OPS[reduce]
    except (KeyError, TypeError):
        raise ValueError(f"reduce must be None, 'mean', 'sum', 'min' or 'max', not {reduce!r}") from None
    if step is not None and (type(step) is not int or not FIRST_STEP <= step <= LAST_STEP):
        step = checked_step(step)
    if weight is not _DEFAULT_WEIGHT and (type(weight) is not int or not 0 <= weight <= _MAX_INT_WEIGHT):
        weight = checked_weight(weight)
    if _pipe is None:
        for name, value in metrics.items():
            check_value(name, value)
        return
    if _curves is not None and _curves.owners:
        _curves.leave_out(metrics)
    _pipe.log(metrics, step, op, weight)


def progress(iterable: Iterable[T], total: int | None = None, desc: str | None = None) -> Iterator[T]:
    """Iterate, and show in the panel how many items are done and how long they take. Calls may be nested.

    Args:
        total: the number of items, if the iterable has no ``len()``.
        desc: a description of one item, e.g. ``"epoch"``.
    """
    global _open_bars
    if total is None and isinstance(iterable, Sized):
        total = len(iterable)
    level, _open_bars = _open_bars, _open_bars + 1
    desc = str(desc or "")[:_DESC_CHARS]
    done = 0
    try:
        _report_progress(level, desc, total, done)
        shown_at = time.monotonic()
        for item in iterable:
            yield item
            done += 1
            now = time.monotonic()
            if now - shown_at >= _PROGRESS_EVERY_S:
                shown_at = now
                _report_progress(level, desc, total, done)
    finally:
        _open_bars = level
        _report_progress(level, desc, total, done)


def count_samples(total: int) -> None:
    """Report to the notebook how many samples this rank's loaders have returned so far."""
    if _pipe is not None:
        _pipe.record(wire.KIND_SAMPLES, "samples", 0, total)


def report_snapshot(name: str) -> None:
    """Report to the notebook that rank 0 has written a snapshot under this name, so that a restart knows of it."""
    if _pipe is not None and not isinstance(_pipe, MetricsFile):
        step = _pipe.last_step()
        with contextlib.suppress(ValueError):  # there are too many names
            _pipe.record(wire.KIND_SAVED, name, -1 if step is None else step, 0.0)


def show(shown: Shown) -> bool:
    """Send an image to the notebook. Returns whether this is a rank, which has a pipe to it."""
    if _pipe is None:
        return False
    _pipe.show(shown)
    return True


def step_to_show(name: str) -> int:
    """The latest step; before the first, the number of images that were shown under this name."""
    step = last_step()
    if step is None:
        step = _shown[name]
        _shown[name] += 1
    return step


def last_step() -> int | None:
    """The latest step; None before the first, and outside a run."""
    return _pipe.last_step() if _pipe is not None else None


def last_steps() -> dict[str, int]:
    """The latest step of each metric; empty outside a run."""
    return _pipe.last_steps() if _pipe is not None else {}


def resume_after(step: int, steps: Mapping[str, int] | None) -> None:
    """Continue the steps that ``log`` counts after this one; ``steps`` are the ``last_steps`` at that time."""
    if _pipe is not None:
        _pipe.resume_after(step, steps)


def send() -> None:
    """Write what was logged within the last milliseconds to the notebook's pipe, as far as that needs no wait."""
    if _pipe is not None:
        _pipe.send()


def flush() -> None:
    """Return when the notebook's pipe holds everything logged so far."""
    if _pipe is not None:
        _pipe.flush()


def _report_progress(level: int, desc: str, total: int | None, done: int) -> None:
    if _pipe is not None:
        _pipe.record(wire.KIND_PROGRESS, desc, -1 if total is None else int(total), done, weight=level)


def enter(fd: int) -> None:
    """Open this rank's metrics pipe, or file; called once, before the user's code."""
    global _pipe
    os.set_blocking(fd, False)
    _pipe = MetricsFile(fd) if stat.S_ISREG(os.fstat(fd).st_mode) else MetricsPipe(fd)
    # A forked DataLoader worker must not log: its ids of names would clash with this process's.
    os.register_at_fork(after_in_child=_leave)


def begin_again(fd: int) -> None:
    """Send to another pipe from now on, as if nothing had been logged before: the next call of a rank that stays."""
    assert _pipe is not None
    os.set_blocking(fd, False)
    _pipe.begin_again(fd)
    _shown.clear()
    if _curves is not None:
        _curves.begin_again()


def listen() -> None:
    """Log from now on what the user's code logs with other libraries."""
    global _curves
    assert _pipe is not None
    _curves = Curves(_log_heard, _pipe.has)
    listen_to_libraries(_curves)


def _log_heard(metrics: dict[str, Any], step: int | None) -> None:
    if _pipe is not None:
        _pipe.log(metrics, step, _OPS[None], _DEFAULT_WEIGHT)


def _leave() -> None:
    global _pipe
    _pipe = None
