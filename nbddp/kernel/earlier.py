"""Finds the earlier run to compare a new one with: the newest of the same function or cell that has curves."""

from __future__ import annotations

import os
import threading
import time

from nbddp.history.history import History
from nbddp.kernel.plan import Call
from nbddp.panel import frontend
from nbddp.panel.view import Earlier
from nbddp.worker import script

_KEPT = 8  # functions and cells; the history of one run of each stays in memory

_begun: dict[str, list[Earlier]] = {}  # by function or cell, the one that was run last at the end
_lock = threading.Lock()


def subject_of(call: Call) -> str:
    """What a call has in common with later calls of the same function, script or cell; "" if that is not known."""
    if call.fn is script.run_cell:
        cell = frontend.cell_id()
        return cell and f"cell {cell}"
    if call.fn is script.run_script:
        return f"script {os.path.abspath(call.args[0].path)}"
    fn = getattr(call.fn, "func", call.fn)  # functools.partial
    return f"{getattr(fn, '__module__', '')}.{getattr(fn, '__qualname__', type(fn).__qualname__)}"


def begin(subject: str, name: str, history: History) -> Earlier | None:
    """Note that a run begins, and return the newest one before it that is over and has logged a metric.

    Args:
        subject: of :func:`subject_of`.
    """
    if not subject:
        return None
    with _lock:
        _forget_those_without_curves()
        before = _begun.pop(subject, [])
        found = next((run for run in reversed(before) if run.history.over), None)
        kept = before[before.index(found) :] if found else before
        _begun[subject] = [*kept, Earlier(name, time.time(), history)]
        while len(_begun) > _KEPT:
            del _begun[next(iter(_begun))]
    return found


def _forget_those_without_curves() -> None:
    for subject, runs in list(_begun.items()):
        _begun[subject] = [run for run in runs if not run.history.over or run.history.latest()]
        if not _begun[subject]:
            del _begun[subject]
