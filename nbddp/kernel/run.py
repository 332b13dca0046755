"""``Run``: what's known of a function, script, or cell on the ranks, and the handle to stop it."""

from __future__ import annotations

import asyncio
import atexit
import collections
import contextlib
import dataclasses
import functools
import sys
import time
import weakref
from collections.abc import Callable, Generator, Sequence
from typing import Any, Generic, NoReturn, TypeVar

from nbddp.errors import NbddpError
from nbddp.history.recording import Recording
from nbddp.kernel import earlier
from nbddp.kernel.attempt import Attempt
from nbddp.kernel.crew import Crew
from nbddp.kernel.interrupts import Latch, interrupts_held
from nbddp.kernel.rank_state import RankState
from nbddp.kernel.settings import Options
from nbddp.loggers.log_to import Destination, Sender
from nbddp.messages import Settings
from nbddp.panel import frontend, html
from nbddp.panel.live import View, view_for
from nbddp.panel.plotted import History
from nbddp.panel.status import RankStatus, Source, Status
from nbddp.process import server
from nbddp.process.gauges import Memory
from nbddp.text import duration, first_line, in_a_line, uncolored, write_line

R = TypeVar("R")
STOP_GRACE_S = 5.0
_EXIT_S = 5.0  # for runs that are stopped because the notebook ends


class Run(Generic[R]):
    """A function, script, or cell on all ranks.

    Attributes:
        name: the name of the function, script, or cell.
        nprocs: how many ranks it has.
        history: its metrics.
        state: ``"starting"``, ``"running"``, ``"finished"``, ``"failed"``, or ``"stopped"``.
        error: the error of a failed run; None otherwise.
        restarts: how many times all ranks were restarted.
        remark: a possible mistake in a finished run, shown once per kernel; "" for none.
        partial: of a stopped run, what each rank returned before its time was up, None for the others; [] if none did.
    """

    def __init__(
        self, settings: Settings, options: Options, log_to: Sequence[Destination] = (), subject: str = ""
    ) -> None:
        self.name, self.nprocs = settings.name, settings.world_size
        self._recording = Recording(self.nprocs)
        self.history = History(self._recording)
        self._sender = Sender(self._recording, log_to)
        self.state = "starting"
        self.error: BaseException | None = None
        self.restarts = 0
        self.remark = ""
        self.partial: list[R | None] = []
        self._settings, self._options, self._subject = settings, options, subject
        self._deadline = float("inf")
        self._before = earlier.before(subject)
        self._views: list[View] = []
        self._began = time.monotonic()
        self._ended: float | None = None
        self._values: list[Any] = []
        self._crew: Crew | None = None
        self._last_ranks: tuple[RankStatus, ...] = ()  # when it was over
        self._memory: dict[int, Memory] = {}  # of a rank that has ended, what it used last
        self._attempt: Attempt | None = None
        self._stop_grace_s: float | None = None  # asked for before there was anything to stop
        self._where = self._cut = self._hang = ""  # as in its attempt, when it ended
        self._parts: list[tuple[RankState, int, int]] = []  # of the ranks' outputs: begin and end
        self._done = Latch()
        self._callbacks: list[Callable[[], object]] = []
        _runs[id(self)] = self
        _newest.append(self)

    # ------------------------------------------------------------------ for the user

    @property
    def value(self) -> R:
        """What rank 0 returned. Raises the run's error."""
        return self.values[0]

    @property
    def values(self) -> list[R]:
        """What each rank returned. Raises the run's error."""
        if self.error is not None:
            raise self.error.with_traceback(None)
        if self.state != "finished":
            advice = "it has no value" if self._done.is_set() else "call wait() first"
            advice += ", but .partial has what the ranks returned" if self.partial else ""
            raise NbddpError(f"{self.name} is {self.state}: {advice}")
        return self._values

    @property
    def seconds(self) -> float:
        """How many seconds the run has taken so far, or took in total."""
        return (self._ended or time.monotonic()) - self._began

    @property
    def pids(self) -> list[int]:
        """The ranks' process ids, on their machines."""
        crew = self._crew  # another thread may end the run
        return [rank.pid for rank in crew.ranks] if crew is not None else []

    def logs(self, rank: int | None = None) -> str:
        """Return what a rank has printed; for all ranks (None), each line begins with its rank."""

        def of_one(rank: int) -> str:
            return "".join(state.output.text(begin, end) for state, begin, end in self._parts if state.number == rank)

        return logs_of(rank, self.nprocs, of_one)

    def stacks(self) -> str:
        """Return where each rank is now, even inside C calls: a summary line, then the stacks."""
        attempt = self._attempt
        if attempt is not None and (found := attempt.stacks()):
            return found
        stopped = f". Where the ranks were: {self._where}" if self._where else ""
        return f"{self.name} ({self.state}): no rank is running{stopped}"

    def stop(self, grace: float = STOP_GRACE_S) -> None:
        """Raise KeyboardInterrupt on all ranks after the same optimizer step; kill the rest after ``grace`` seconds."""
        self._ask_to_stop(grace)
        self._done.wait()

    def show(self) -> None:
        """Show the run in this cell, even when it's over: the live panel, a picture, or a line of text."""
        self._show(True)

    def wait(self, timeout: float | None = None) -> Run[R]:
        """Wait until the run is over. Raises its error, or TimeoutError after ``timeout`` seconds."""
        if (error := self.exception(timeout)) is not None:
            raise error
        return self

    def result(self, timeout: float | None = None) -> R:
        """Return rank 0's value, as ``concurrent.futures.Future`` does."""
        return self.wait(timeout).value

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return the run's error, as ``concurrent.futures.Future`` does."""
        if not self._done.wait(timeout):
            doing = self.state if self.state in ("starting", "running") else "sending its metrics"
            raise TimeoutError(f"{self.name} is still {doing} after {timeout} s")
        with interrupts_held():
            self._draw()  # the thread that follows it may not have, and updates come in while a cell runs
        return self.error

    def done(self) -> bool:
        """Return whether it is over."""
        return self._done.is_set()

    def cancel(self) -> bool:
        """Return False: a run has started, so it can't be canceled. Use ``stop()``."""
        return False

    def __await__(self) -> Generator[Any, None, Run[R]]:
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        self._callbacks.append(lambda: loop.call_soon_threadsafe(lambda: future.done() or future.set_result(None)))  # type: ignore[func-returns-value]
        if not self._done.is_set():
            yield from future
        return self.wait()

    def __repr__(self) -> str:
        why = f": {type(self.error).__name__}" if self.error is not None else ""
        ranks = f"{self.nprocs} rank{'s' * (self.nprocs != 1)}"
        return f"<Run {self.name}: {self.state}{why}, {ranks}, {duration(self.seconds)}>"

    def _ipython_display_(self) -> None:
        """Show nothing more in a cell that shows it anyway."""
        cell = frontend.cell_number()
        if cell is None or cell not in [view.cell for view in self._views]:
            raise NotImplementedError  # IPython then asks for its texts

    def _repr_html_(self) -> str | None:
        """Its picture, if there are curves."""
        return html.picture(self.history, self._status(), self._before) if self.history.latest() else None

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Run can't be sent; pass its value")

    # ------------------------------------------------------------------ for what carries it out

    def _show(self, kind: bool | str | None) -> None:
        """Open a view in this cell; the thread that follows the run draws it."""
        self._views.append(view_for(self._source(), kind))
        self._draw()

    def _draw(self) -> None:
        for view in self._views:
            try:
                view.update()
            except Exception as error:  # of a front end, or our own: the run goes on
                self._views = [each for each in self._views if each is not view]  # another thread may draw it, too
                write_line(f"[nbddp: {self.name} can't be shown here anymore: {in_a_line(error)}]")

    def _source(self) -> Source:
        return Source(self.history, self._status, self._before, self._tail, self._ask_to_stop)

    def _status(self) -> Status:
        state, error, attempt = self.state, self.error, self._attempt  # another thread may end the run
        settings = self._settings
        return Status(
            name=self.name,
            state=state,
            seconds=self.seconds,
            summary=f"{self.nprocs} rank{'s' * (self.nprocs != 1)} · {settings.backend or settings.device}"
            + f" · {settings.nnodes} nodes" * (settings.nnodes > 1),
            error=first_line(str(error)) if error is not None else "",
            failed_rank=getattr(error, "rank", None),
            remark=self.remark or first_line(getattr(error, "advice", "")),
            restarts=self.restarts,
            max_restarts=settings.max_restarts,
            hang=attempt.locator.hang if attempt is not None else self._hang,
            blocking=self._options.wait,
            ranks=self._last_ranks or self._rank_statuses(self._crew),
        )

    def _rank_statuses(self, crew: Crew | None) -> tuple[RankStatus, ...]:
        self._memory |= crew.memory() if crew is not None else {}
        found = []
        for rank in crew.ranks if crew is not None else map(RankState, range(self.nprocs)):
            device, state, waits = self._settings.device, rank.state, ""
            device += f":{self._settings.indices[rank.number % len(self._settings.indices)]}" if device != "cpu" else ""
            if self.state in ("failed", "stopped") and state != "finished":
                state = "stopped"
            if rank.prompt is not None:
                waits = f"at line {line}" if (line := rank.paused_at) else "for input"
            resident, gpu = self._memory.get(rank.number, (None, None))
            found.append(RankStatus(rank.number, device, state, resident, gpu, rank.host, waits))
        return tuple(found)

    def _tail(self, rank: int, chars: int) -> str:
        """The end of what that rank has printed, since the last restart."""
        for state, begin, end in reversed(self._parts):
            if state.number == rank:
                start = max(begin, min(end, state.output.size) - 16 * chars)  # a rewritten bar takes many bytes
                return uncolored(state.output.text(start, end))[-chars:]
        return ""

    def _ask_to_stop(self, grace_s: float = STOP_GRACE_S) -> None:
        self._stop_grace_s = grace_s
        crew, attempt = self._crew, self._attempt  # another thread may end the run
        if crew is not None and attempt is not None:
            crew.inbox.put(functools.partial(attempt.stop, grace_s))

    def _wait_for(self, what: str) -> None:
        """Show what it waits for before it can start. Raises KeyboardInterrupt if it's stopped."""
        self.remark = what
        self._draw()
        if self._stop_grace_s is not None:
            raise KeyboardInterrupt

    def _stopped_text(self) -> str:
        where = f"Where the ranks were: {self._where}" if self._where else ""
        partial = "What the ranks returned is in last_run().partial" if self.partial else ""
        return ". ".join(filter(None, [f"{self.name} was stopped", where, partial, self._cut]))

    def _steps(self) -> list[int]:
        return [rank.step for rank in self.history.ranks]

    def _take_part(self, crew: Crew, attempt: Attempt) -> None:
        """The next order to a crew is a part of this run, with its metrics. A stop() may have come before."""
        self._crew, self._attempt, self.remark = crew, attempt, ""
        self._end_parts()
        self._parts += [(rank, begin, sys.maxsize) for rank, begin in zip(crew.ranks, attempt.printed_before)]
        if self._stop_grace_s is not None:
            self._ask_to_stop(self._stop_grace_s)

    def _detach(self) -> None:
        """The ranks have ended."""
        self._crew = self._attempt = None

    def _conclude(self, state: str, error: BaseException | None = None) -> None:
        """It's over; once. An interrupt ends only the wait for where its metrics go."""
        if self._done.is_set():
            return
        try:
            self._settle(state, error)
            self._sender.finish()
        finally:
            self._say_its_over()

    @interrupts_held()
    def _settle(self, state: str, error: BaseException | None) -> None:
        self._end_parts()
        if (attempt := self._attempt) is not None and state != "finished":
            self._where, self._cut, self._hang = attempt.where, attempt.cut, attempt.locator.hang
        self._recording.settle(broken_off=state != "finished")  # first: who sees the state draws the end
        self.error = error
        self.state, self._ended = state, time.monotonic()
        self._note_ranks()
        failed = getattr(error, "rank", None)
        self._last_ranks = tuple(
            dataclasses.replace(each, state="failed") if each.rank == failed else each for each in self._last_ranks
        )
        self._detach()

    def _note_ranks(self) -> None:
        """Keep how its ranks are: what they're asked from now on isn't a part of it."""
        self._last_ranks = self._last_ranks or self._rank_statuses(self._crew)

    def _end_parts(self) -> None:
        self._parts = [(rank, begin, min(end, rank.output.size)) for rank, begin, end in self._parts]

    @interrupts_held()
    def _say_its_over(self) -> None:
        earlier.keep(self._subject, self.history)
        self._done.set()
        for call in self._callbacks:
            with contextlib.suppress(RuntimeError):  # the event loop that waited is closed
                call()
        self._draw()


def logs_of(rank: int | None, nprocs: int, of_one: Callable[[int], str]) -> str:
    """Return what ``of_one`` returns for this rank; for all ranks (None), each line begins with its rank."""
    if rank is None:
        return "".join(f"[rank {each}] {line}\n" for each in range(nprocs) for line in of_one(each).splitlines())
    if not 0 <= rank < nprocs:
        raise ValueError(f"there is no rank {rank} (nprocs={nprocs})")
    return of_one(rank)


_runs: weakref.WeakValueDictionary[int, Run[Any]] = weakref.WeakValueDictionary()  # what carries a run out holds it
_newest: collections.deque[Run[Any]] = collections.deque(maxlen=1)  # kept even if no variable holds it


def runs() -> list[Run[Any]]:
    """Return the active runs, those that a variable holds, and the latest one; oldest first."""
    return sorted((run for ref in _runs.valuerefs() if (run := ref())), key=lambda run: run._began)


def shutdown() -> None:
    """Stop all runs, end the fork server (which frees the memory that torch takes there), and release Ray's nodes."""
    _stop_all()
    if nodes := sys.modules.get("nbddp.ray.nodes"):
        nodes.give_back()
    server.shut_down()


@atexit.register  # after multiprocessing's handler, to run before it: that one would wait for the ranks
def _stop_all() -> None:
    going = [run for run in runs() if not run.done()]
    for run in going:
        run._ask_to_stop(0.0)
    deadline = time.monotonic() + _EXIT_S
    for run in going:
        run._done.wait(max(0.0, deadline - time.monotonic()))


def last_run() -> Run[Any] | None:
    """Return the latest run; it's kept even if no variable holds it."""
    return _newest[0] if _newest else None
