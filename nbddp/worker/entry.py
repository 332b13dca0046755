"""One rank's life: arm the dead man's switch, set up, report ready, call the function, report, leave."""

from __future__ import annotations

import atexit
import dataclasses
import functools
import itertools
import multiprocessing
import multiprocessing.context
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any

import torch

from nbddp import payload, versions, wire
from nbddp.payload.known import Known
from nbddp.worker import (
    breakpoints,
    context,
    dead_man_switch,
    debugger,
    inherited,
    main_module,
    metrics,
    output,
    process_group,
    reports,
    setup,
    staying,
    users_frames,
)
from nbddp.worker.setup import Ends


def main(channel: Connection, ends: Ends, handed: Sequence[Any]) -> None:
    """Run one rank. The only function that the notebook's side calls, and only in a new process."""
    dead_man_switch.arm()
    output.redirect(ends.output)
    _detach_from_fork_server()
    job = wire.decode(channel.recv_bytes())
    assert isinstance(job, wire.Job), job
    debugger.connect(channel)
    report = _live(job, channel, ends, handed)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # must not interrupt the report; the notebook kernel can use SIGKILL
    channel.send_bytes(wire.encode(report))
    if ends.release is not None:
        staying.obey(ends.release)
        staying.serve(channel, job, functools.partial(_next_call, channel, ends))
        _end()
    else:
        _leave(channel)


def _detach_from_fork_server() -> None:
    """Drop the state that was inherited from the fork server, including its start method.

    The user's processes get the platform's default start method, but on Linux fork, which was the default there before
    Python 3.14. A rank's own fork server would import torch before each epoch's DataLoader workers (10 s), and leave
    semaphores in /dev/shm when it is killed. Forking with threads that hold locks is dangerous, but has not been a
    problem for DataLoader workers.
    """
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if inherited.forked:
        atexit._clear()  # the server's handlers; a spawned rank has only its own
    multiprocessing.set_start_method(None, force=True)
    default: Any = multiprocessing.context._default_context
    if sys.platform == "linux":
        # Private; Python 3.10 to 3.14. It must not be read: 3.14.10 would make a temporary file to find the default.
        default._default_context = multiprocessing.get_context("fork")


def _next_call(channel: Connection, ends: Ends, job: wire.Job, fds: Sequence[int]) -> wire.Message:
    """Take one more call on a rank that stays."""
    metrics_fd, output_fd, payload_fd, result_fd = fds
    metrics.begin_again(metrics_fd)
    output.continue_in(output_fd)
    ends = dataclasses.replace(ends, payload=payload_fd, result=result_fd)
    try:
        report = _live(job, channel, ends, (), main_module.of_the_notebook)
        staying.refuse_interrupts()
    except KeyboardInterrupt as error:  # before the report of another exception
        report = reports.failed(error, time.monotonic(), "call", result_fd)
    if not isinstance(report, wire.Finished):
        _restore_modes()
    output.flush()
    metrics.flush()  # all of this call is in its own pipe
    os.close(result_fd)
    return report


def _restore_modes() -> None:
    """Reset what an interrupt in the middle of a ``with torch.no_grad()`` or ``autocast`` leaves behind."""
    torch.set_grad_enabled(True)
    torch.clear_autocast_cache()
    for device in {"cpu", context.device().type}:
        torch.set_autocast_enabled(device, False)


def _live(
    job: wire.Job,
    channel: Connection,
    ends: Ends,
    handed: Sequence[Any],
    ready: Callable[[], ModuleType] | None = None,
) -> wire.Message:
    """Set up, call the function, and return one message with the result. The worker's only broad ``except``.

    Args:
        ready: returns the ``__main__`` of a rank that is already set up.
    """
    phase = "setup"
    sigchld = signal.getsignal(signal.SIGCHLD)  # torch's, once a DataLoader has had workers
    try:
        if ready is not None:
            staying.allow_interrupts()
            notebook = ready()
        else:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            notebook = setup.set_up(job, ends)
            debugger.enter()
            channel.send_bytes(wire.encode(wire.Ready(versions.package_folder())))
        phase = "unpack"
        call, known = unpack(job, ends.payload, notebook, handed)
        phase = "call"
        debugger.begin_call(job)
        payload.note_call(ends.result)
        value = users_frames.call(call)
        debugger.end_call()
        phase = "pack"
        return reports.finished(value, ends.result, known, job)
    except setup.UnfitServer as error:
        return wire.Unfit(time.monotonic(), error.preloaded, error.outdated)
    except BaseException as error:
        at = time.monotonic()  # before anything slow: the run reports its earliest failure
        debugger.end_call()
        if phase == "call":
            debugger.post_mortem(error)
        # An interrupt, or torch's handler that raises when a DataLoader worker dies, must not replace the error.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        if isinstance(error, SystemExit) and phase == "call":
            return reports.exited(error)
        failed = reports.failed(error, at, phase, ends.result)
        channel.send_bytes(wire.encode(wire.Raised(**vars(failed))))
        reports.end_loaders_of(error)
        return reports.with_the_exception(failed, error, ends.result, known if phase in ("call", "pack") else None)
    finally:
        if ready is not None:
            signal.signal(signal.SIGCHLD, sigchld)


def unpack(job: wire.Job, fd: int, notebook: ModuleType, handed: Sequence[Any] = ()) -> tuple[Callable[[], Any], Known]:
    """Unpack the function with its arguments from the block ``fd``, and the objects known from the notebook."""
    imported = len(sys.modules)
    unpacked = payload.unpack(fd, job.payload_nbytes, inherited=handed, device=context.device())
    known = main_module.publish(notebook, unpacked, job.by_value if job.stays else None)
    process_group.adopt_group()
    os.close(fd)
    function, args, kwargs = unpacked.value
    modules = _newest_modules(len(sys.modules) - imported) if job.attended else []
    code = [*unpacked.by_value, *modules]
    debugger.expect_stops(job.attended and (job.post_mortem or breakpoints.are_in(args, code)))
    if job.pass_rank:
        args = (job.rank, *args)
    return functools.partial(function, *args, **kwargs), known


def _newest_modules(count: int) -> list[ModuleType]:
    """Return the modules imported last. To touch all of them would copy thousands of pages of the fork server's."""
    return [sys.modules[name] for name in itertools.islice(reversed(sys.modules), max(0, count))]


def _leave(channel: Connection) -> None:
    """Flush, wait until every rank has reported, and end."""
    output.flush()
    metrics.flush()
    try:
        while not isinstance(debugger.receive(channel), wire.Leave):
            pass  # for the debugger, and too late
    except (EOFError, OSError):
        return
    _end()


def _end() -> None:
    """End as Python does: first threads, then exit handlers."""
    process_group.close_group()
    # Before the exit handlers, because executors end their processes here and multiprocessing's handler joins those.
    # multiprocessing calls it again when this process ends (Python 3.10 to 3.14), which does nothing.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    output.flush()
