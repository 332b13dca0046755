"""``run``: fresh ranks for one function, script, or cell, with their restarts."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import CodeType
from typing import Any, Unpack

from nbddp import errors, payload
from nbddp.errors import CellError, LaunchError, NanLogged, NbddpError, PayloadError, RankDied, RankError, RunTimeout
from nbddp.kernel import earlier, failure
from nbddp.kernel.advice import refuse_launchers, remark
from nbddp.kernel.attempt import OF_A_RUN, Attempt
from nbddp.kernel.crew import Crew
from nbddp.kernel.interrupts import interrupts_to
from nbddp.kernel.page import Page, keep_ipythons_debugger_closed
from nbddp.kernel.rank_state import RankState
from nbddp.kernel.run import R, Run
from nbddp.kernel.settings import Given, Options, check_call, decide, on_ray, takes_options
from nbddp.loggers.log_to import destinations
from nbddp.messages import Function, Settings
from nbddp.payload import Packed, explain
from nbddp.process.machine import LocalMachine
from nbddp.text import in_a_line
from nbddp.tracebacks import users_cause

_SEE_PARTIAL = ". Everything else that the ranks returned is in this error's .partial, by rank"
_RESTARTED = (RankError, RankDied, CellError, LaunchError, errors.NodeLost)
Machines = Callable[[], Sequence[Any]]
Work = Callable[[Run[Any], Crew, Packed], None]  # on an open crew: call(), a cell


@takes_options
def run(
    fn: Callable[..., R], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, **options: Unpack[Given]
) -> Run[R]:
    """Call ``fn(*args, **kwargs)`` on every rank, and wait: a fresh process per GPU, or several on the CPU.

    The function, its classes, and its data are sent by value; modules are imported on the ranks. A process group is
    ready when the function begins; a function that calls ``init_process_group`` gets the group that it asks for.

    Args:
        nprocs: number of ranks, over all machines. Default: one per visible GPU, else 2 on each machine's CPU.
        nnodes: number of Ray nodes; Ray assigns the GPUs. The cluster is that of the notebook's ``ray.init`` or
            ``RAY_ADDRESS``, or the one running on this machine. Default: only this machine, without Ray.
        device: ``"cuda"``, ``"cpu"``, or another accelerator of torch. Default: GPUs if there are any.
        gpus: which GPUs, by number; one rank each. With ``backend="gloo"``, ranks may share one: ``gpus=[0, 0]``. Their
            device is :func:`nbddp.device`, not ``cuda:<LOCAL_RANK>``.
        backend: the process group's backend. Default: ``"nccl"`` on CUDA, ``"gloo"`` on the CPU.
        init_process_group: False: no process group, only torchrun's environment variables.
        seed: seeds Python, NumPy, and torch on each rank with ``seed + rank``.
        deterministic: True: turns on torch's deterministic algorithms and sets cuDNN's flags.
        env: environment variables for the ranks, in addition to the notebook's current ones.
        timeout: limit for the whole run's wall time, in seconds. Default: no limit.
        pg_timeout: timeout of each collective, in seconds. Default: an hour if a cell waits for the run, else torch's.
        max_restarts: how many times all ranks may be restarted after a failure.
        stop_on_nan: True: end the run as soon as a rank logs NaN (an infinity doesn't end it). A restart would only
            repeat it, so there is none.
        wait: False: return at once, and run in the background.
        show: False: show nothing while it runs. ``"panel"``, ``"picture"``, or ``"text"``: this view, instead of the
            one that fits the front end. The environment variable ``NBDDP_PANEL`` does the same for all runs.
        name: the run's name. Default: the function's.
        log_to: where the metrics go in addition to ``history``: an object with ``add_scalar``, ``log_metrics``, or
            W&B's ``log``, or a function ``f(step, metrics)``; or a list of these. The notebook writes to it, so there's
            one run for all ranks.
        autolog: True: what rank 0 logs with TensorBoard's ``SummaryWriter``, W&B, and other libraries is in
            ``history``, too, as if :func:`nbddp.log` had logged it.
        pdb: True: after an exception, the debugger opens in the failing rank's frames, before the cell raises the
            error. Default: what ``%pdb`` is set to.

    Returns:
        The run: ``run.value`` is what rank 0 returned.

    Raises:
        LaunchError: the arguments are invalid, or a rank ended before it was ready.
        PayloadError: an object can't be sent to the ranks or back; the error names the variable.
        RankError: the function raised on a rank; its exception is the ``cause``.
        RankDied: a signal, ``sys.exit(1)``, or ``os._exit`` ended a rank.
        NodeLost: a node is gone, or can't be reached.
        RunTimeout: ``timeout`` expired.
        NanLogged: a rank logged NaN, and ``stop_on_nan`` is true.
        KeyboardInterrupt: the run was interrupted or stopped; its ranks have ended.
    """
    chosen = Options(**options)
    name = check_call(fn, args, kwargs or {}, chosen.name)
    settings = decide(name, chosen)
    packed = pack_call(name, fn, tuple(args), dict(kwargs or {}), elsewhere=chosen.nnodes is not None)
    launched = launch(settings, packed, chosen, earlier.function(fn))
    return launched.wait() if chosen.wait else launched


def launch(settings: Settings, packed: Packed, options: Options, subject: str, work: Work | None = None) -> Run[Any]:
    """Carry out a run, in the background if it's not waited for. Raises KeyboardInterrupt if it was stopped.

    Args:
        subject: what it has in common with an earlier run that it's compared with.
    """
    launched: Run[Any] = Run(settings, options, destinations(options.log_to), subject)
    if options.show is not False:
        with interrupts_to(launched._ask_to_stop):
            launched._show(options.show)
    machines = machines_for(settings, options, launched._wait_for)
    carry_out_it = functools.partial(carry_out, launched, packed, machines, work)
    if not options.wait:
        threading.Thread(target=carry_out_it, name=f"nbddp-{settings.name}", daemon=True).start()
        return launched
    carry_out_it()
    if launched.error is not None:
        keep_ipythons_debugger_closed()
    if launched.state == "stopped":
        raise errors.without_our_frames(KeyboardInterrupt(launched._stopped_text()))
    return launched


def pack_call(
    name: str,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    failure: str = "can't be sent to the ranks",
    elsewhere: bool = False,
) -> Packed:
    """Pack a call. Raises PayloadError with the user's name of what can't be sent; LaunchError for a launcher in it."""
    named = {name: fn, **{f"args[{index}]": arg for index, arg in enumerate(args)}, **kwargs}
    packed = pack((fn, args, kwargs), named, f"{name} {failure}", elsewhere=elsewhere)
    try:
        refuse_launchers(name, packed.codes)
    except BaseException:  # an interrupt's traceback would keep it open
        packed.block.close()
        raise
    return packed


def pack(obj: object, named: Mapping[str, Any], what: str, *, elsewhere: bool = False) -> Packed:
    """Pack an object. Raises PayloadError: says what can't be sent, and its part, which has this name."""
    try:
        return payload.pack(obj, elsewhere=elsewhere)
    except Exception as error:  # whatever a user's __reduce__ raises
        raise explain.explained(dict(named), error, what=what) from users_cause(error)


def machines_for(settings: Settings, options: Options, waiting: Callable[[str], None]) -> Machines:
    """Return what gets the machines for an attempt: this one, or nodes of Ray's.

    Args:
        waiting: is called again and again with what is waited for; what it raises ends the wait.
    """
    if options.nnodes is None:
        return lambda: [LocalMachine()]
    gpus = settings.world_size // options.nnodes if settings.device != "cpu" else 0
    return functools.partial(on_ray().machines, options.nnodes, gpus, waiting)


def carry_out(run: Run[Any], packed: Packed, machines: Machines, work: Work | None = None) -> None:
    """Carry out a run, with its restarts, on this thread. All that may be raised is in ``run.error`` afterwards."""
    first: NbddpError | None = None
    run._deadline = time.monotonic() + (run._options.timeout or float("inf"))
    with packed.block, contextlib.ExitStack() as at_last:
        at_last.callback(run._conclude, "stopped")  # if it was interrupted between two lines of ours
        while True:
            try:
                crew = Crew(dataclasses.replace(run._settings, restart_count=run.restarts), machines())
                with contextlib.ExitStack() as stack:
                    stack.callback(crew.end)
                    crew.open()
                    (work or call)(run, crew, packed)
                    crew.dismiss(gives_up=functools.partial(_is_stopped, run))
                run._conclude("finished")
            except NbddpError as error:
                # Not what a helper has raised: the same would happen again.
                may_heal = isinstance(error, _RESTARTED) and not isinstance(error.__cause__, NbddpError)
                if may_heal and run.restarts < run._options.max_restarts and run._stop_grace_s is None:
                    first = first or error
                    run._recording.restart(in_a_line(error))  # first: who sees the count reads the reason
                    run.restarts += 1
                    run._values = []
                    run.state = "starting"
                    run._detach()
                    continue
                if first is not None:
                    error.restarts, error.first = run.restarts, first
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


def _is_stopped(run: Run[Any]) -> bool:
    run._draw()
    return run._stop_grace_s is not None


def call(run: Run[Any], crew: Crew, packed: Packed) -> None:
    """Call the function on an open crew, and take what the ranks return. Raises how it failed."""
    page = Page(crew.ranks, quiet=run._options.is_quiet)
    order = Function(run.name, crew.note_definitions(packed), packed.block)
    try:
        attempt = follow_part(run, crew, order, crew.ranks, page)
    except (KeyboardInterrupt, RunTimeout):
        take_partial_values(run, crew)
        raise
    take_values(run, crew, attempt, packed.codes)


def follow_part(run: Run[Any], crew: Crew, order: Any, ranks: Sequence[RankState], page: Page) -> Attempt:
    """Follow an order that's a part of a run on fresh ranks. Raises why it was stopped, if it was.

    Raises:
        NanLogged, RunTimeout, KeyboardInterrupt: for a NaN, by the timeout, or by the user.
    """
    options = run._options

    def look(attempt: Attempt) -> None:
        if run.state == "starting" and all(rank.interruptible for rank in crew.ranks):
            run.state = "running"
        if options.stop_on_nan and run.history.first_nan and not attempt.ending:
            attempt.stop()
        run._draw()

    attempt = Attempt(crew, order, ranks, page, OF_A_RUN, deadline=run._deadline, look=look)
    crew.metrics_to, crew.steps = run._recording.add, run._steps
    run._take_part(crew, attempt)
    attempt.follow()
    if options.stop_on_nan and (nan := run.history.first_nan):
        metric, step, rank = nan
        raise NanLogged(metric, step, [rank])
    if attempt.ending == "late":
        raise RunTimeout(
            f"{run.name} was still {run.state} after its timeout of {options.timeout} s and was stopped. "
            f"Where the ranks were: {attempt.where}"
        )
    if attempt.was_stopped:
        raise KeyboardInterrupt
    return attempt


def take_partial_values(run: Run[Any], crew: Crew) -> None:
    """Take what ranks of a stopped run have returned in time."""
    found = dict[int, Any]()
    for rank in crew.ranks:
        if rank.report is not None and rank.failure is None:
            with contextlib.suppress(Exception):  # of a user's __setstate__
                found[rank.number] = rank.value(crew.definitions)
    if any(value is not None for value in found.values()):
        run.partial = [found.get(rank.number) for rank in crew.ranks]


def take_values(run: Run[Any], crew: Crew, attempt: Attempt, codes: Sequence[CodeType]) -> None:
    """Take what the ranks have returned. Raises the first failure, or PayloadError if not all of it could be sent."""
    if any(rank.failed for rank in crew.ranks):
        raise failure.error_of(failure.first(crew.ranks), run.name, crew, attempt.where)
    reports = [rank.report for rank in crew.ranks if rank.report is not None]
    try:
        found = [rank.value(crew.definitions) for rank in crew.ranks]
    except Exception as error:  # of a user's __setstate__, or a module that only the ranks have
        raise PayloadError(f"what {run.name} returned can't be unpickled here: {in_a_line(error)}") from error
    if lost := [report for report in reports if report.lost]:
        incomplete = PayloadError(lost[0].lost + _SEE_PARTIAL, lost[0].path)
        incomplete.partial = found
        raise incomplete
    run._values = found
    run.remark = remark(run.name, reports, codes)
