"""``Run``: the handle of one run, from its start to its value."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import time
import weakref
from collections.abc import Generator, Sequence
from typing import Any, Generic, TypeVar

from nbddp import doors, errors, payload
from nbddp.errors import NbddpError
from nbddp.forkserver import server as forkserver
from nbddp.history.album import Album
from nbddp.history.history import History
from nbddp.kernel import earlier
from nbddp.kernel import state as run_state
from nbddp.kernel.metrics_out import MetricsOut
from nbddp.kernel.plan import Plan
from nbddp.kernel.supervisor import Supervisor
from nbddp.kernel.viewable import ViewableRun
from nbddp.kernel.views import RunViews
from nbddp.launch.interface import Site
from nbddp.launch.output import labelled
from nbddp.panel import frontend
from nbddp.panel.card import Card
from nbddp.sinks.interface import Sink
from nbddp.text import duration

R = TypeVar("R")
_EXIT_TIMEOUT_S = 2.0
# After a second interrupt: all ranks end within 2 s, so a longer wait means that something else hangs.
_SECOND_INTERRUPT_TIMEOUT_S = 5.0
_INTERRUPT_S = 0.5  # from the interrupt of the ranks to that of the kernel, at most

_all: weakref.WeakSet[Run[Any]] = weakref.WeakSet()
_live: set[Run[Any]] = set()
_last: Run[Any] | None = None


class Run(Generic[R]):
    """The handle of a run: its state, metrics, output and result; has the methods of a ``concurrent.futures.Future``.

    Attributes:
        name: the function's name, or ``run(name=...)``.
        nprocs: number of ranks.
        history: the metrics so far.
    """

    def __init__(
        self,
        plan: Plan,
        pickled: payload.Pickled,
        site: Site,
        *,
        blocking: bool = False,
        sinks: Sequence[Sink] = (),
        subject: str = "",
    ) -> None:
        self.name = plan.name
        self.nprocs = plan.nprocs
        self.history = History(plan.nprocs)
        self._plan = plan
        self._supervisor = Supervisor(plan, pickled, self.history, site)
        self._state = self._supervisor.state
        self._state.dialog.attended = plan.attended
        self._blocking = blocking
        self._subject = subject
        self._viewable = ViewableRun(plan, self._state, self.history, site, blocking=blocking)
        self._views = RunViews(plan.name, self._viewable, self._supervisor, blocking=blocking)
        self._metrics_out = MetricsOut(sinks, self.history, self._state)
        self._state.when_done(lambda: _live.discard(self))

    # ------------------------------------------------------------------ state and results

    @property
    def state(self) -> str:
        """``starting``, ``running``, ``finished``, ``failed`` or ``stopped``."""
        return self._state.phase

    @property
    def seconds(self) -> float:
        """Seconds since the start; once the run is over, its duration."""
        return self._state.seconds

    @property
    def error(self) -> BaseException | None:
        """The error that a failed run raises; None otherwise."""
        return self._state.error

    @property
    def remark(self) -> str:
        """A possible mistake in a finished run, in one line: no rank took part in a collective. Otherwise ""."""
        return self._state.remark

    @property
    def value(self) -> R:
        """What rank 0 (of a call on some ranks: the first of these) returned, tensors on the CPU.

        Raises the run's error if it failed.
        """
        return self.values[self._plan.ranks[0] if self._plan.ranks else 0]

    @property
    def values(self) -> list[R]:
        """What each rank returned, by rank. Raises the run's error if it failed."""
        if self.error is not None:
            raise self.error.with_traceback(None)
        if self._state.values is None:
            advice = "wait() for it" if self.state in ("starting", "running") else "it has no value"
            raise NbddpError(f"{self.name} is {self.state}: {advice}")
        return self._state.values

    @property
    def figures(self) -> Album:
        """What the ranks have shown so far with :func:`nbddp.show`: ``run.figures["samples"][-1]`` is the newest."""
        return self.history.figures

    @property
    def world_size(self) -> int:
        """Number of ranks, as torch calls it; the same as ``nprocs``."""
        return self.nprocs

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks that have been started, by rank; also after their end."""
        return self._state.pids()

    @property
    def restarts(self) -> int:
        """How often all ranks have been restarted."""
        return self._state.restarts

    def logs(self, rank: int | None = None) -> str:
        """Return the output of that rank; with None, the output of all ranks, each line labelled with its rank.

        The output is complete while the run goes on; afterwards the newest 4 MiB of each rank are kept.
        """
        if rank is not None:
            self._check_rank(rank)
        return labelled(self._state.outputs, rank) if self._state.outputs else ""

    def stacks(self) -> str:
        """Return where the main thread of each rank is now, also inside C calls: a summary line, then the stacks."""
        return self._supervisor.stacks()

    def __repr__(self) -> str:
        error = f" ({type(self.error).__name__})" if self.error is not None else ""
        return f"<Run {self.name}: {self.state}{error}, {self._viewable.summary()}, {duration(self.seconds)}>"

    def _repr_html_(self) -> str | None:
        return self._views.html()

    def __reduce__(self) -> Any:
        raise TypeError("a Run stays in the notebook; pass its value")

    # ------------------------------------------------------------------ control

    def stop(self, grace: float = run_state.STOP_GRACE_S) -> None:
        """End the run: KeyboardInterrupt in every rank, SIGKILL after ``grace`` seconds. Returns when all ended."""
        self._state.request_stop(grace)
        self._supervisor.join()
        self._metrics_out.wait()

    def wait(self, timeout: float | None = None) -> Run[R]:
        """Wait for the end. An interrupt ends the waiting, not the run.

        Raises:
            TimeoutError: the run still goes on after ``timeout`` seconds. Otherwise what ``run()`` raises.
        """
        if not self._supervisor.join(timeout):
            raise TimeoutError(self._still_runs(timeout))
        self._views.show_the_end()
        self._metrics_out.wait()
        if self.error is not None:
            raise self.error
        return self

    def result(self, timeout: float | None = None) -> R:
        """Wait for the end, and return what rank 0 returned. Raises as :meth:`wait`."""
        return self.wait(timeout).value

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the end, and return the run's error or None. Raises TimeoutError after ``timeout`` seconds."""
        if not self._supervisor.join(timeout):
            raise TimeoutError(self._still_runs(timeout))
        self._metrics_out.wait()
        return self.error

    def done(self) -> bool:
        """Return whether the run is over."""
        return self._state.done.is_open

    def cancel(self) -> bool:
        """:meth:`stop` the run. Returns whether that ended it; False if the run was already over."""
        if self.done():
            return False
        self.stop()
        return self.state == "stopped"

    def __await__(self) -> Generator[Any, None, Run[R]]:
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()

        def resolve() -> None:
            if not ended.done():  # cancelled: nobody waits any more
                ended.set_result(None)

        def wake_loop() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(resolve)

        self._state.when_done(lambda: self._metrics_out.when_over(wake_loop))
        yield from ended
        return self.wait()

    def show(self) -> None:
        """Show the run here, also when it is over: the live panel, a picture, or a line of text."""
        self._views.open(again=True)

    def card(self, *, dark: bool = False) -> Card:
        """Return a picture for sharing, 1200 x 630 pixels: name, ranks, time, last metrics, one or two charts.

        A notebook displays it; ``run.card().save("card.svg")`` writes a file, also ``.png`` if cairosvg is installed.

        Args:
            dark: True: light text on a dark page.
        """
        return self._views.card(dark=dark)

    def debug(self, rank: int = 0) -> None:
        """Stop a rank of this run, which is in the background, and open the debugger under the calling cell.

        The rank stops at its next line of Python; inside a collective, that is when the collective is over, and until
        then the cell shows where it is. ``c`` lets it go on, and so does an interrupt of the cell.

        Raises:
            NbddpError: the run is over, or nobody can answer here.
        """
        self._check_rank(rank)
        if self.done() or not frontend.has_stdin():
            why = f"it is {self.state}" if self.done() else "nobody can answer here"
            raise NbddpError(f"{self.name} cannot be debugged: {why}")
        self._views.debug(rank)

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.nprocs:
            raise ValueError(f"there is no rank {rank}: {self.name} has ranks 0 to {self.nprocs - 1}")

    # ------------------------------------------------------------------ inside

    def begin(self, *, show: bool | str | None, remember: bool = True) -> None:
        """Start and show the run, and wait for the end if it is blocking; an interrupt at any moment ends the run.

        Args:
            remember: False: it is not a run of the user's, and ``last_run()`` and ``runs()`` leave it out.

        Raises:
            KeyboardInterrupt: the run was stopped. Otherwise the run's error.
        """
        try:
            self._start_and_watch(show, remember)
        except KeyboardInterrupt:
            was_over = self._state.done.is_open  # and the cell may have waited for what takes the metrics
            self._stop_and_wait()
            self._views.update()
            if was_over and self.error is not None and not self._ranks_were_interrupted():
                raise self.error from None
            if not was_over:
                self._metrics_out.start()  # the interrupt may have come before the start
                self._metrics_out.wait()
            raise errors.interrupt(self._stopped_text()) from None
        except BaseException:  # raised by a view
            self._state.request_stop(0.0)
            raise
        finally:
            # Another interrupt may have ended the handling of the first one; the run must not go on unseen.
            if self._blocking and not self._state.done.is_open:
                self._state.request_stop(0.0)
        if self._blocking and self.state == "stopped":  # by the panel's button: as if the cell had been interrupted
            raise errors.interrupt(self._stopped_text())
        if self._blocking and self.error is not None:
            if self._ranks_were_interrupted():
                self._wait_for_interrupt()
            if self._plan.post_mortem:
                frontend.skip_debugger_of_this_cell()
            raise self.error

    def _start_and_watch(self, show: bool | str | None, remember: bool) -> None:
        global _last
        _live.add(self)
        self._supervisor.start()
        self._metrics_out.start()
        if remember:
            _last = self
            _all.add(self)
            self._viewable.earlier = earlier.begin(self._subject, self.name, self.history)
        if show is None and self._blocking and self._plan.stays:
            self._views.open_unless_short()
        elif show is not False:
            self._views.open(show=show)
        if self._blocking:
            self._views.follow()
            self._metrics_out.wait()
        else:
            self._state.data_copied.wait()

    def _ranks_were_interrupted(self) -> bool:
        return isinstance(getattr(self.error, "cause", None), KeyboardInterrupt)

    def _wait_for_interrupt(self) -> None:
        """VS Code's button interrupts all processes below the kernel, and then the kernel."""
        try:
            time.sleep(_INTERRUPT_S)
        except KeyboardInterrupt:
            raise errors.interrupt(self._stopped_text()) from None

    def _stop_and_wait(self) -> None:
        """End the run after an interrupt; after a second interrupt, without grace and without waiting forever."""
        grace_s, wait_s = run_state.STOP_GRACE_S, None
        over = False
        while not over:
            try:
                self._state.request_stop(grace_s)
                self._supervisor.start()  # the interrupt may have come before the start
                self._supervisor.join(wait_s)
                over = True
            except KeyboardInterrupt:
                grace_s, wait_s = 0.0, _SECOND_INTERRUPT_TIMEOUT_S

    def _still_runs(self, timeout: float | None) -> str:
        return f"{self.name} is still {self.state} after {timeout} s; stop() ends it"

    def _stopped_text(self) -> str:
        where = self._state.stop_summary
        return f"{self.name} was stopped. It was here: {where}" if where else f"{self.name} was stopped"


def last_run() -> Run[Any] | None:
    """Return the newest run of this notebook kernel, or None; it is kept even if no variable holds it."""
    return _last


def runs() -> list[Run[Any]]:
    """Return the runs of this notebook kernel that go on or that a variable holds, and the newest; oldest first."""
    return sorted(_all, key=lambda run: run._state.began)


def going() -> list[Run[Any]]:
    """Return the runs that are not over, oldest first."""
    return [run for run in runs() if run in _live]


def shutdown() -> None:
    """Stop all runs of this notebook kernel and end its fork server; the next run starts a new one.

    This frees about 300 MB: the modules that every rank needs. The next run imports them again.
    """
    for run in going():
        run.stop()
    doors.close_sessions()
    forkserver.shut_down()


def _stop_all() -> None:
    """At the kernel's exit, end all ranks; multiprocessing would wait for them to end by themselves."""
    for run in list(_live):
        run._state.request_stop(0.0)
    for run in list(_live):
        run._supervisor.join(_EXIT_TIMEOUT_S)
    for run in runs():
        run._metrics_out.wait(_EXIT_TIMEOUT_S)


def _disown_all() -> None:
    """In a process forked from the kernel, such as a DataLoader worker: hold nothing of the ranks open."""
    for run in _live:
        run._supervisor.disown()
    _live.clear()
    _all.clear()


atexit.register(_stop_all)
os.register_at_fork(after_in_child=_disown_all)
