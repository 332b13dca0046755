"""``run``: a crew that is opened for one call."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nbddp import errors, payload
from nbddp.errors import CellError, LaunchError, NanLogged, NbddpError, PayloadError, RankDied, RankError, RunTimeout
from nbddp.kernel import earlier, failure
from nbddp.kernel.attempt import OF_A_RUN, Attempt, Patience
from nbddp.kernel.crew import Crew
from nbddp.kernel.interrupts import interrupts_to
from nbddp.kernel.page import Page, keep_ipythons_debugger_closed, notebook
from nbddp.kernel.rank_state import RankState
from nbddp.kernel.run import Run
from nbddp.kernel.settings import Options, check_call, decide, takes_options
from nbddp.loggers.log_to import destinations
from nbddp.messages import Function, Settings
from nbddp.payload import Packed, explain
from nbddp.process.machine import LocalMachine
from nbddp.text import in_a_line

_SIDE_BY_SIDE = (
    "no rank took part in a collective: {} ranks worked side by side, without sharing gradients. "
    "To train one model, wrap it: nbddp.wrap(model)"
)
_SEE_PARTIAL = ". Everything else that the ranks returned is in this error's .partial, by rank"
_RESTARTED = (RankError, RankDied, CellError, LaunchError)
Machines = Callable[[], Sequence[Any]]
Call = Callable[..., None]  # open_and_call, or what a cell has in its place


@takes_options
def run(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    options: Options,
) -> Run[Any]:
    """Call ``fn(*args, **kwargs)`` on fresh ranks, and wait for them.

    Returns:
        The run: ``run.value`` is what rank 0 returned.

    Raises:
        LaunchError, PayloadError, RankError, RankDied, RunTimeout, NanLogged: the first failure in time.
        KeyboardInterrupt: it was interrupted or stopped.
    """
    name = check_call(fn, args, kwargs or {}, options.name)
    settings = decide(name, options, attended=options.wait and notebook() is not None)
    packed = pack_call(name, fn, tuple(args), dict(kwargs or {}))
    launched = launch(settings, packed, options, earlier.function(fn))
    return launched.wait() if options.wait else launched


def launch(settings: Settings, packed: Packed, options: Options, subject: str, call: Call | None = None) -> Run[Any]:
    """Carry out a run, in the background if it's not waited for. Raises KeyboardInterrupt if it was stopped.

    Args:
        subject: what it has in common with an earlier run that it's compared with.
    """
    launched: Run[Any] = Run(settings, destinations(options.log_to), subject=subject, blocking=options.wait)
    if options.show is not False:
        with interrupts_to(launched._ask_to_stop):
            launched._show(options.show)
    carry_out_it = functools.partial(carry_out, launched, settings, packed, options, call=call)
    if not options.wait:
        threading.Thread(target=carry_out_it, name=f"nbddp-{settings.name}", daemon=True).start()
        return launched
    carry_out_it()
    if launched.error is not None:
        keep_ipythons_debugger_closed()
    if launched.state == "stopped":
        raise errors.interrupt(launched._stopped_text())
    return launched


def pack_call(
    name: str,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    failure: str = "cannot be sent to the ranks",
    for_job: bool = False,
) -> Packed:
    """Pack a call. Raises PayloadError with the user's name of what can't be sent."""
    try:
        return payload.pack((fn, args, kwargs), for_job=for_job)
    except Exception as error:  # whatever a user's __reduce__ raises
        named = {name: fn, **{f"args[{index}]": arg for index, arg in enumerate(args)}, **kwargs}
        raise explain.explained(named, error, what=f"{name} {failure}") from error


def carry_out(
    run: Run[Any],
    settings: Settings,
    packed: Packed,
    options: Options,
    machines: Machines = lambda: [LocalMachine()],
    call: Call | None = None,
) -> None:
    """Carry out a run, with its restarts, on this thread. All that may be raised is in ``run.error`` afterwards."""
    with packed.block:
        try:
            _carry_out(run, settings, packed, options, machines, call or open_and_call)
        finally:
            if not run.done():  # interrupted between two lines of ours
                run._conclude("stopped")


def _carry_out(
    run: Run[Any], settings: Settings, packed: Packed, options: Options, machines: Machines, call: Call
) -> None:
    first: NbddpError | None = None
    deadline = time.monotonic() + (options.timeout or float("inf"))
    while True:
        try:
            call(
                run,
                dataclasses.replace(settings, restart_count=run.restarts),
                packed,
                options,
                machines,
                deadline,
            )
            run._conclude("finished")
        except NbddpError as error:
            # Not what a helper has raised: the same would happen again.
            may_heal = isinstance(error, _RESTARTED) and not isinstance(error.__cause__, NbddpError)
            if may_heal and run.restarts < options.max_restarts and run._stop_grace_s is None:
                first = first or error
                run.history.restart(in_a_line(error))  # first: who sees the count reads the reason
                run.restarts += 1
                run._values = []
                run.state = "starting"
                run._detach()
                continue
            if first is not None:
                error.after_restarts(run.restarts, first)
            run._conclude("failed", error)
        except KeyboardInterrupt:
            run._conclude("finished" if run._values else "stopped")
            if run._values:  # it has ended only the wait for what the function has left
                raise
        except BaseException as error:
            ours = NbddpError(f"nbddp itself failed: {in_a_line(error)}")
            ours.__cause__ = error
            run._conclude("failed", ours)
        break


def open_and_call(
    run: Run[Any],
    settings: Settings,
    packed: Packed,
    options: Options,
    machines: Machines,
    deadline: float,
) -> None:
    """Open a crew, call, close. Raises how it failed, or KeyboardInterrupt if it was stopped."""
    crew = Crew(settings, machines())
    with contextlib.ExitStack() as stack:
        stack.callback(crew.end)
        crew.open()
        page = Page(crew.ranks, quiet=options.show is False or not options.wait)
        call_and_collect(run, crew, packed, page, deadline, timeout=options.timeout, stop_on_nan=options.stop_on_nan)

        def is_stopped() -> bool:
            run._draw()
            return run._stop_grace_s is not None

        crew.dismiss(gives_up=is_stopped)


def call_and_collect(
    run: Run[Any],
    crew: Crew,
    packed: Packed,
    page: Page,
    deadline: float = float("inf"),
    *,
    timeout: float | None = None,
    patience: Patience = OF_A_RUN,
    stop_on_nan: bool = False,
    received: int = 0,
) -> None:
    """Call the function on an open crew, and take its values. Raises how it failed.

    Args:
        received: how many of the notebook's classes and functions, of all in ``packed``, the ranks have got before.
    """
    order = Function(run.name, received)
    attempt = Attempt(
        crew,
        order,
        crew.ranks,
        page,
        patience,
        payload=packed.block,
        deadline=deadline,
        look=functools.partial(look, run, crew, patience, stop_on_nan),
        steps=run._steps,
    )
    run._take_part(crew, attempt)
    attempt.follow()
    raise_if_stopped(run, attempt, timeout, stop_on_nan)
    if any(rank.failed for rank in crew.ranks):
        failed = failure.first(crew.ranks)
        raise failure.error_of(failed, run.name, crew.ranks, packed.by_value, crew.device, attempt.where)
    run._values = values(run.name, crew, packed)
    if len(crew.ranks) > 1 and not any(rank.report.met for rank in crew.ranks if rank.report):
        run.remark = _SIDE_BY_SIDE.format(len(crew.ranks))


def look(run: Run[Any], crew: Crew, patience: Patience, stop_on_nan: bool, attempt: Attempt) -> None:
    """Look at a run while it goes on."""
    if run.state == "starting" and all(rank.interruptible for rank in crew.ranks):
        run.state = "running"
    if stop_on_nan and run.history.first_nan and not attempt.stopping:
        attempt.stop(patience.after_interrupts_s[0])
    run._draw()


def raise_if_stopped(run: Run[Any], attempt: Attempt, timeout: float | None, stop_on_nan: bool) -> None:
    """Raise why it was stopped, if it was: for a NaN, by the timeout, or by the user."""
    if stop_on_nan and (nan := run.history.first_nan):
        metric, step, rank = nan
        raise NanLogged(metric, step, [rank])
    if attempt.timed_out:
        raise RunTimeout(
            f"{run.name} was still {run.state} after its timeout of {timeout} s and was stopped. "
            f"It was here: {attempt.where}"
        )
    if attempt.was_stopped:
        raise KeyboardInterrupt


def values(name: str, crew: Crew, packed: Packed) -> list[Any]:
    """Return what the ranks returned. Raises PayloadError if not all of it could be sent."""
    found, lost = [], []
    for rank in crew.ranks:
        found.append(_value(name, rank, packed.by_value))
        if rank.report is not None and rank.report.lost:
            lost.append(rank.report)
    if lost:
        error = PayloadError(lost[0].lost + _SEE_PARTIAL, lost[0].path)
        error.partial = found
        raise error
    return found


def _value(name: str, rank: RankState, known: Sequence[Any]) -> Any:
    try:
        return rank.value(known)
    except Exception as error:  # of a user's __setstate__, or a module that only the ranks have
        raise PayloadError(f"what {name} returned cannot be unpickled here: {in_a_line(error)}") from error
