"""Kernel side. One run from the call to its value: ``run()`` and the ``Run`` it gives back."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import dataclasses
import os
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import torch

from nbddp import culprit, errors, payload
from nbddp.errors import NbddpError
from nbddp.kernel import source
from nbddp.kernel.crew import Site
from nbddp.kernel.far import Far
from nbddp.kernel.history import History
from nbddp.kernel.hosts import Hosts, log_in
from nbddp.kernel.local import Local
from nbddp.kernel.output import labelled
from nbddp.kernel.plan import STALL_AFTER_S, Plan, check_call, make_plan
from nbddp.kernel.supervisor import Supervisor
from nbddp.panel.live import view_for
from nbddp.panel.text import duration
from nbddp.panel.view import View
from nbddp.waiting import start_thread

_REDRAW_S = 0.2
_EXIT_S = 2.0
_INSISTENT_S = 5.0  # after a second interrupt: all is gone within 2 s, or what hangs is not the ranks
_MOST_BY_FORK_SERVER = 200  # fds of queues and shared tensors; multiprocessing's limit is 256 in all

_live: set[Run] = set()
_last: Run | None = None


def run(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    nprocs: int | Mapping[str, int] | None = None,
    device: str | torch.device | None = None,
    gpus: Sequence[int] | None = None,
    backend: str | None = None,
    init: bool = True,
    seed: int | None = None,
    deterministic: bool = False,
    env: Mapping[str, str] | None = None,
    timeout: float | None = None,
    pg_timeout: float | None = None,
    max_restarts: int = 0,
    stall_after: float | None = STALL_AFTER_S,
    wait: bool = True,
    show: bool | None = None,
    name: str | None = None,
    start_method: str | None = None,
    hosts: Hosts = None,
    min_hosts: int | None = None,
    keep_children: bool = False,
    oversubscribe: bool = False,
) -> Run:
    """Run ``fn(*args, **kwargs)`` on every rank: one fresh process per GPU, or on the CPU.

    The function, the classes and the data that it uses travel by value from the notebook, modules by
    import. A process group is ready when it begins; if it calls ``init_process_group`` itself, it
    gets the group that it asks for.

    Args:
        fn: called on every rank with the same arguments.
        nprocs: number of ranks; of each host, if there are several, or a mapping from host to number.
            Default: all visible GPUs, else 2 on the CPU.
        device: ``"cuda"``, ``"cpu"`` or another accelerator of torch. Default: GPUs if there are any.
        gpus: which GPUs, by number; one rank each.
        backend: of the process group. Default: ``"nccl"`` on CUDA, ``"gloo"`` on the CPU.
        init: False: no process group, only torchrun's environment variables.
        seed: seeds python, numpy and torch on each rank with ``seed + rank``.
        deterministic: sets torch's deterministic algorithms and cuDNN flags.
        env: environment variables for the ranks, over the notebook's present ones.
        timeout: wall time of the whole run, in seconds. Default: no limit.
        pg_timeout: of each collective, in seconds. Default: torch's.
        max_restarts: after a failure all ranks start again, at most so often.
        stall_after: when nothing has been logged or printed for so many seconds, the panel tells where
            each rank is. None: never.
        wait: False: return at once, the run goes on in the background.
        show: False: show nothing while it runs.
        name: default: the function's.
        start_method: ``"forkserver"`` (default where there is one) or ``"spawn"``.
        hosts: run on these, as your ``ssh`` knows them, in the order of the ranks (``"localhost"``: this machine);
            ``"slurm"``: on the nodes of this allocation; or an open :func:`nbddp.cluster`.
        min_hosts: when a host is lost and ``max_restarts`` allows it, go on with so many. Default: all.
        keep_children: True: a process that a rank starts in a session or process group of its own (a daemon, a
            tracking server) goes on when the rank has ended; the ranks then start by ``"spawn"``. Default: all that
            a rank starts ends with it.
        oversubscribe: True: also more than 16 ranks per core of this machine's CPU (and more than 64).

    Returns:
        The run, finished unless ``wait=False``; its ``value`` is what rank 0 returned.

    Raises:
        LaunchError: the arguments cannot work, or a rank ended before it was ready.
        PayloadError: something does not travel; names the variable.
        RankError: the function raised on a rank; its exception is the ``cause``.
        RankDied: a rank ended by a signal or by ``os._exit``. RunTimeout: ``timeout`` is over.
        HostLost: nothing more is heard of a host.
        KeyboardInterrupt: the cell was interrupted; the ranks are gone.
    """
    kwargs = dict(kwargs or {}) if isinstance(kwargs, Mapping) or not kwargs else kwargs
    plan, site = planned(
        fn,
        args,
        kwargs,
        nprocs=nprocs,
        device=device,
        gpus=gpus,
        backend=backend,
        init=init,
        seed=seed,
        deterministic=deterministic,
        env=env,
        timeout=timeout,
        pg_timeout=pg_timeout,
        max_restarts=max_restarts,
        stall_after=stall_after,
        name=name,
        start_method=start_method,
        hosts=hosts,
        min_hosts=min_hosts,
        keep_children=keep_children,
        oversubscribe=oversubscribe,
    )
    return launch(plan, site, fn, tuple(args), kwargs, wait=wait, show=show)


def planned(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    hosts: Hosts = None,
    name: str | None = None,
    **options: Any,
) -> tuple[Plan, Site]:
    """What the run is to be, and where its ranks start; logs in to the hosts, if there are any.

    The arguments are those of :func:`run`. Raises LaunchError.
    """
    check_call(fn, args, kwargs, name)
    with contextlib.ExitStack() as login:
        cluster = log_in(hosts, login)
        if cluster is None:
            plan = make_plan(fn, args, kwargs, name=name, **options)
            return plan, Local(plan)
        plan = make_plan(fn, args, kwargs, name=name, hosts=cluster.devices(), **options)
        return plan, Far(plan, cluster, login.pop_all())


def launch(
    plan: Plan,
    site: Site,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    wait: bool,
    show: bool | None,
) -> Run:
    """Pack, start, and unless told otherwise watch until the end."""
    with contextlib.ExitStack() as unless_begun:
        unless_begun.callback(site.close)
        pickled = _pickled(plan, fn, args, kwargs)
        if len(pickled.packed.inherited) > _MOST_BY_FORK_SERVER:
            plan = dataclasses.replace(plan, start_method="spawn")
        started = Run(plan, pickled, site, blocking=wait)
        unless_begun.pop_all()
    try:
        started._begin(wait=wait, show=show)
    finally:
        # What shows it cannot, or one more interrupt came while one was handled: it shall not go on unseen.
        if wait and not started._supervisor.done.is_open:
            started._supervisor.request_stop(0.0)
    if wait and started.state == "stopped":  # by the panel's button: as if the cell had been interrupted
        raise errors.interrupt(started._stopped_text())
    if wait and started.error is not None:
        raise started.error
    return started


def last_run() -> Run | None:
    """The newest run of this kernel, or None: a lost variable loses nothing."""
    return _last


def going() -> list[Run]:
    """The runs of this kernel that are not over, oldest first."""
    return sorted(_live, key=lambda run: -run.seconds)


def _pickled(plan: Plan, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> payload.Pickled:
    """The function and its data, before any process exists."""
    try:
        return payload.prepare((fn, args, kwargs), inheriting=not plan.shares)
    except Exception as error:  # whatever a user's __reduce__ raises
        left_out = {name for name in plan.optional if not _travels(kwargs[name], plan)}
        if left_out:
            kept = {name: value for name, value in kwargs.items() if name not in left_out}
            return _pickled(dataclasses.replace(plan, optional=frozenset()), fn, args, kept)
        named = {plan.name: fn, **{f"args[{i}]": arg for i, arg in enumerate(args)}, **kwargs}
        raise culprit.explain(named, error, what=f"cannot send {plan.name} to the ranks") from None


def _travels(value: Any, plan: Plan) -> bool:
    try:
        payload.probe(value, inheriting=not plan.shares)
    except Exception:  # whatever a user's __reduce__ raises
        return False
    return True


class Run:
    """A run: what it is doing, what it has shown, what came of it.

    Attributes:
        name: the function's, or ``run(name=...)``.
        nprocs: number of ranks.
        history: the metrics so far.
    """

    def __init__(self, plan: Plan, pickled: payload.Pickled, site: Site, *, blocking: bool = False) -> None:
        self.name = plan.name
        self.nprocs = plan.nprocs
        self.history = History(plan.nprocs)
        self._plan = plan
        self._supervisor = Supervisor(plan, pickled, self.history, site)
        self._blocking = blocking
        self._views: list[View] = []
        self._followed = False
        self._source = source.Source(plan, self._supervisor, self.history, site, blocking=blocking)
        self._supervisor.when_done(lambda: _live.discard(self))

    # ------------------------------------------------------------------ what came of it

    @property
    def state(self) -> str:
        """``starting``, ``running``, ``finished``, ``failed`` or ``stopped``."""
        return self._supervisor.state

    @property
    def seconds(self) -> float:
        """Since the start; of a run that is over, how long it took."""
        return self._supervisor.seconds

    @property
    def error(self) -> BaseException | None:
        """What a failed run raises; None otherwise."""
        return self._supervisor.error

    @property
    def remark(self) -> str:
        """Of a finished run, a line about what may not be as meant: no rank took part in a collective. Else ""."""
        return self._supervisor.remark

    @property
    def value(self) -> Any:
        """What rank 0 returned, tensors on the CPU. Raises the run's error if it failed."""
        return self.values[0]

    @property
    def values(self) -> list[Any]:
        """What each rank returned, by rank. Raises the run's error if it failed."""
        if self.error is not None:
            raise self.error.with_traceback(None)
        if self._supervisor.values is None:
            advice = "wait() for it" if self.state in ("starting", "running") else "it has no value"
            raise NbddpError(f"{self.name} is {self.state}: {advice}")
        return self._supervisor.values

    def logs(self, rank: int | None = None) -> str:
        """What that rank printed, or with None what each did, every line labelled.

        All of it while the run goes on; of a run that is over each rank's newest 4 MiB.
        """
        if rank is not None and not 0 <= rank < self.nprocs:
            raise ValueError(f"there is no rank {rank}: {self.name} has ranks 0 to {self.nprocs - 1}")
        return labelled(self._supervisor.outputs, rank) if self._supervisor.outputs else ""

    def stacks(self) -> str:
        """Where each rank's main thread is now, also inside C calls: a line that sums up, then the stacks."""
        return self._supervisor.stacks()

    def __repr__(self) -> str:
        error = f" ({type(self.error).__name__})" if self.error is not None else ""
        return f"<Run {self.name}: {self.state}{error}, {self._source.summary()}, {duration(self.seconds)}>"

    def __reduce__(self) -> Any:
        raise TypeError("a Run stays in the notebook; pass its value")

    # ------------------------------------------------------------------ steering it

    def stop(self, grace: float = source.STOP_GRACE_S) -> None:
        """End the run: KeyboardInterrupt in every rank, SIGKILL after ``grace`` seconds; return when all are gone."""
        self._supervisor.request_stop(grace)
        self._supervisor.join()

    def wait(self, timeout: float | None = None) -> Run:
        """Wait for the end. Interrupting this ends the waiting, not the run.

        Raises:
            TimeoutError: it still runs after ``timeout`` seconds. Otherwise what ``run()`` raises.
        """
        if not self._supervisor.join(timeout):
            raise TimeoutError(f"{self.name} is still {self.state} after {timeout} s; stop() ends it")
        self._tell_of_the_end()
        if self.error is not None:
            raise self.error
        return self

    def __await__(self) -> Generator[Any, None, Run]:
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()

        def tell() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(_resolve, ended)

        self._supervisor.when_done(tell)
        yield from ended
        return self.wait()

    def show(self) -> None:
        """Show the run here: the live panel, also when the run is over; where there is no page, a line of text."""
        self._open_view(wanted=False, again=True)

    # ------------------------------------------------------------------ inside

    def _begin(self, *, wait: bool, show: bool | None) -> None:
        """Start, show, and wait for the end. An interrupt, wherever it comes, ends the run first."""
        global _last
        try:
            _live.add(self)
            self._supervisor.start()
            _last = self
            if show is not False:
                self._open_view(wanted=bool(show))
            if wait:
                self._watch()
            else:
                self._supervisor.taken.wait()
        except KeyboardInterrupt:
            self._stop_insistently()
            self._redraw()
            raise errors.interrupt(self._stopped_text()) from None
        except BaseException:  # of what shows it
            self._supervisor.request_stop(0.0)
            raise

    def _open_view(self, *, wanted: bool, again: bool = False) -> None:
        """In the calling cell; whoever watches the run keeps it up to date."""
        view = view_for(self._source, wanted=wanted, again=again, echo=self._blocking and not again)
        view.update(self._source.status(), self.history)
        self._views.append(view)
        if again and self._supervisor.done.is_open:
            view.update(self._source.status(), self.history)  # it may have ended between the two lines above
            return
        if not self._blocking and view.live and not self._followed:
            # No cell waits for this run, so the panel needs a thread; it ends with the run.
            self._followed = True
            # Refused: the panel stays as it is, and the run goes on.
            start_thread(self._watch, f"nbddp-panel-{self.name}", lambda _: None)

    def _watch(self) -> None:
        """Until the end; of a blocking run on the caller's thread: only there do all front ends show updates."""
        while not self._supervisor.join(_REDRAW_S if self._views else None):
            self._redraw()
        self._redraw()

    def _redraw(self) -> None:
        output = self._new_output() if self._views and self._blocking else ""
        status = self._source.status()
        for view in list(self._views):
            view.write(output)
            view.update(status, self.history)

    def _tell_of_the_end(self) -> None:
        """Of a background run, to views that no thread keeps up to date: lines of text, or the picture, here."""
        if not self._blocking:
            for view in list(self._views):
                if not view.live:
                    view.update(self._source.status(), self.history)

    def _new_output(self) -> str:
        outputs = self._supervisor.outputs
        return outputs[0].take() if outputs else ""

    def _stop_insistently(self) -> None:
        """After an interrupt: end the run; after a second one without the grace, and without waiting for ever."""
        grace_s, wait_s = source.STOP_GRACE_S, None
        over = False
        while not over:
            try:
                self._supervisor.request_stop(grace_s)
                self._supervisor.start()  # the first interrupt may have come before that
                self._supervisor.join(wait_s)
                over = True
            except KeyboardInterrupt:
                grace_s, wait_s = 0.0, _INSISTENT_S

    def _stopped_text(self) -> str:
        where = self._supervisor.was_here()
        return f"{self.name} was stopped. It was here: {where}" if where else f"{self.name} was stopped"


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():  # cancelled: nobody waits any more
        future.set_result(None)


def _stop_all() -> None:
    """At the kernel's exit: multiprocessing would wait for the ranks' own end."""
    for run in list(_live):
        run._supervisor.request_stop(0.0)
    for run in list(_live):
        run._supervisor.join(_EXIT_S)


def _disown_all() -> None:
    """In a process forked from the kernel (a DataLoader worker, say): it neither keeps the ranks nor ends them."""
    for run in _live:
        run._supervisor.disown()
    _live.clear()


atexit.register(_stop_all)
os.register_at_fork(after_in_child=_disown_all)
