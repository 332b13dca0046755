"""A rank's report of how its call has ended: with a value, an exception or an exit."""

from __future__ import annotations

import dataclasses
import functools
import sys
import time
import traceback
from typing import Any

import torch.distributed as dist
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter  # private; torch 2.6 to 2.15

from nbddp import payload, wire
from nbddp.errors import CAUSE_CHARS
from nbddp.payload import partial, unpicklable
from nbddp.payload.known import Known
from nbddp.text import bounded
from nbddp.tracebacks import drop_our_frames, make_picklable
from nbddp.worker import context, failing_line, namespace, process_group

_EXIT_CHARS = 1000  # longest text of sys.exit() that is reported


def finished(value: Any, fd: int, known: Known, job: wire.Job) -> wire.Message:
    """Write the value into the block ``fd``. Returns the report.

    Raises:
        PayloadError: nothing of the value can be sent.
    """
    try:
        nbytes = 0 if value is None else payload.pack(value, fd, known=known, back=True).nbytes
        held = namespace.held() if job.stays and context.is_primary() else ()
        in_group = dist.is_initialized()
        return wire.Finished(nbytes, time.monotonic(), process_group.has_met(), in_group=in_group, held=held)
    except Exception as error:  # whatever a user's __reduce__ raises
        what = f"the value that {job.run_name} returned on rank {job.rank} cannot be sent to the notebook"
        explained = unpicklable.explain({"the result": value}, error, what=what, back=True)
    if not explained.path:
        raise explained
    nbytes = payload.pack(partial.parts_of(value, known), fd, known=known, back=True).nbytes
    return wire.Finished(nbytes, time.monotonic(), process_group.has_met(), str(explained), explained.path)


def exited(error: SystemExit) -> wire.Message:
    """Return the report of a call that has ended by ``sys.exit``, and print the text of the exit, as Python does."""
    at = time.monotonic()
    if error.code is None or error.code == 0:
        return wire.Finished(0, at, process_group.has_met())
    if isinstance(error.code, int):
        return wire.Exited(error.code & 0xFF, "", at)  # as in a process's exit status
    text = _text_of(error.code)
    print(text, file=sys.stderr)
    return wire.Exited(1, bounded(text, _EXIT_CHARS, f"run.logs({context.rank()})"), at)


def _text_of(value: object) -> str:
    try:
        return str(value)
    except Exception as error:  # whatever a user's __str__ raises
        return f"a {type(value).__name__} whose str() raises {type(error).__name__}"


@functools.cache  # a class that was pickled once is never freed
def _look_alike(name: str, module: str) -> type[Exception]:
    return type(name, (Exception,), {"__module__": module})


def failed(error: BaseException, at: float, phase: str, fd: int) -> wire.Failed:
    """Return the report, with a stand-in that pickles: an exception of the same name, text and frames."""
    text = "".join(traceback.format_exception_only(type(error), error)).strip()
    summary = bounded(text, CAUSE_CHARS)
    drop_our_frames(error)
    stand_in = _look_alike(type(error).__name__, type(error).__module__)(text.partition(": ")[2] or text)
    stand_in.__traceback__ = error.__traceback__
    make_picklable(stand_in)
    names = failing_line.names(error) if phase == "call" else ()
    return wire.Failed(payload.pack(stand_in, fd, back=True).nbytes, at, phase, summary, names)


def end_loaders_of(error: BaseException) -> None:
    """End the DataLoader workers of loops that the error has left.

    When the error is freed, torch asks them to end. An interrupt can lose that request, and torch then waits 5 s.
    """
    for frame, _ in traceback.walk_tb(error.__traceback__):
        for value in list(frame.f_locals.values()):
            if isinstance(value, _MultiProcessingDataLoaderIter) and not value._persistent_workers:
                for worker in getattr(value, "_workers", ()):
                    worker.terminate()


def with_the_exception(failed: wire.Failed, error: BaseException, fd: int, known: Known | None) -> wire.Failed:
    """The same report with the exception itself, if it pickles."""
    make_picklable(error)
    try:
        nbytes = payload.pack(error, fd, known=known, back=True).nbytes
    except Exception:  # whatever a user's __reduce__ raises; before anything is written
        return failed
    return dataclasses.replace(failed, nbytes=nbytes)
