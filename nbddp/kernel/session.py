"""``Session``: a crew that stays open. Its ranks keep their names from one order to the next, also after a failure."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any, Unpack

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from nbddp.errors import LaunchError, NbddpError, SessionLost
from nbddp.kernel import earlier, failure
from nbddp.kernel.attempt import OF_A_SESSION, OF_AN_ANSWER, Attempt, Patience
from nbddp.kernel.cells import Cells, cell_number, pack_names, refuse_launchers_in, show_lines_of
from nbddp.kernel.crew import Crew
from nbddp.kernel.interrupts import interrupts_to
from nbddp.kernel.page import Page, keep_ipythons_debugger_closed
from nbddp.kernel.rank_state import RankState
from nbddp.kernel.run import R, Run, logs_of
from nbddp.kernel.settings import Given, Options, check_call, decide, takes_options
from nbddp.kernel.start import machines_for, pack_call, take_partial_values, take_values
from nbddp.loggers.log_to import destinations
from nbddp.messages import Cell, Complete, CountCollectives, Function, Hear, Inspect, Mend
from nbddp.text import in_a_line, write_line

ONLY_OF_RUNS = ("timeout", "max_restarts", "stop_on_nan", "wait", "pdb")
_SHORT_S = 0.3  # a cell that takes longer is a run


@dataclass
class _Present:
    """The order that the ranks have, and its run, as soon as there is something to keep or to show."""

    order: Any
    attempt: Attempt
    subject: str | None  # of its run; None: the cell
    began: float
    run: Run[Any] | None = None
    is_shown: bool = False


class Session(Cells):
    """Ranks that stay alive and keep their variables between calls: ``with nbddp.Session(nprocs=4) as session``.

    It takes the options of :func:`nbddp.run`, except for ``timeout``, ``max_restarts``, ``stop_on_nan``, ``wait``, and
    ``pdb``.

    Attributes:
        nprocs: how many ranks it has.
        lost: why the session is over; "" while it's open.

    Raises:
        LaunchError: the options are invalid, or a rank ended before it was ready.
    """

    @takes_options
    def __init__(self, **options: Unpack[Given]) -> None:
        chosen = Options(**options)
        for name in ONLY_OF_RUNS:
            if getattr(chosen, name) != getattr(Options(), name):
                raise LaunchError(f"{name}= is an option of run(), not of a session")
        self._settings = decide(chosen.name or "session", chosen, cells=True)
        self._options, self.nprocs, self.lost = chosen, self._settings.world_size, ""
        self._log_to = destinations(chosen.log_to)
        self._busy = self._closed = False
        self._group, self._released = 0, False  # the default one's number; does it have to be replaced?
        self._present: _Present | None = None
        self._early: list[tuple[int, list[Any]]] = []  # what threads of the ranks have logged between orders
        self._pushed: MutableMapping[Any, set[str]] = WeakTensorKeyDictionary()  # parameters, with their names
        self._crew = Crew(self._settings, machines_for(self._settings, chosen, functools.cache(write_line))())
        self._crew.metrics_to, self._crew.steps = self._logged, self._steps
        try:
            self._crew.open()
            self._question(CountCollectives(), self._crew.ranks, OF_A_SESSION)  # an interrupt ends ranks that start
            atexit.register(self.close)
        except BaseException:
            self.close()
            raise

    # ------------------------------------------------------------------ for the user

    def cell(self, source: str, ranks: Sequence[int] | None = None, *, pdb: bool = False, keep: bool = False) -> None:
        """Run a cell in IPython on all ranks, or on ``ranks``. Raises a CellError named after the first rank's error.

        Args:
            pdb: an error opens the debugger.
            keep: the cell becomes ``last_run()``, with its last line's values. Otherwise, only a cell that logged
                something, took a while, or failed does so, without values.
        """
        self._cell(source, ranks, (), {}, pdb=pdb, keep=keep)

    def _cell(
        self,
        source: str,
        ranks: Sequence[int] | None,
        out: Sequence[str],
        into: dict[str, Any],
        *,
        pdb: bool = False,
        keep: bool = False,
    ) -> None:
        """Run a cell, and bring these names back from the first of its ranks."""
        asked = self._asked(ranks)
        refuse_launchers_in(source)
        self._run_cell(Cell(source, cell_number(), asked[0].number, pdb), asked, keep, out, into)

    def _leave(self) -> None:
        self.close()

    def run(self, fn: Callable[..., R], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Run[R]:
        """Call a function on all ranks. Returns the run; raises what ``nbddp.run`` raises."""
        asked = self._asked(None)
        name = check_call(fn, args, kwargs or {}, None)
        elsewhere = self._options.nnodes is not None
        with (packed := pack_call(name, fn, tuple(args), dict(kwargs or {}), elsewhere=elsewhere)).block:
            order = Function(name, self._crew.note_definitions(packed), packed.block)
            subject, codes = earlier.function(fn), packed.codes
            run = self._order(order, asked, self._page(0), keep=True, subject=subject, codes=codes)
        assert run is not None
        return run.wait()

    def push(self, **values: Any) -> None:
        """Set these variables on all ranks. Values that share parameters must be pushed in one call."""
        self._refuse_torn(values)
        with (packed := pack_names(values, self._options)).block:
            self._asked(None)
            self._push(packed)
        self._note_pushed(values)

    def pull(self, *names: str, rank: int | None = None) -> Any:
        """Return a variable's value from the lowest rank that's alive, or from ``rank``; a tuple for several names.

        Raises:
            PayloadError: one of the values can't be sent.
            SessionLost: the rank has ended. ValueError: there is no such rank.
        """
        return self._pull(names, self._living(rank))

    def _complete(self, code: str, cursor: int) -> dict[str, Any]:
        """Return rank 0's completions, as a kernel replies."""
        return self._question(Complete(code, cursor), self._asked([0]))[0]  # type: ignore[no-any-return]

    def _inspect(self, code: str, cursor: int, level: int = 0) -> dict[str, Any]:
        """Describe an object of rank 0, as a kernel replies."""
        return self._question(Inspect(code, cursor, level), self._asked([0]))[0]  # type: ignore[no-any-return]

    def logs(self, rank: int | None = None) -> str:
        """Return what a rank has printed since its start; for all ranks (None), each line begins with its rank."""
        return logs_of(rank, self.nprocs, lambda number: self._crew.ranks[number].output.text())

    def close(self) -> None:
        """End the ranks."""
        if self._closed:
            return
        self._closed, self.lost = True, "the session is closed"
        atexit.unregister(self.close)
        try:
            if all(rank.alive and rank.ready for rank in self._crew.ranks):
                self._crew.dismiss()
        finally:
            self._crew.end()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is not None:  # it doesn't wait for threads and children that the ranks have left, as in a run
            self._crew.kill(self._crew.ranks)
        self.close()

    def __repr__(self) -> str:
        return f"<Session: {self.lost or 'open'}, {self.nprocs} rank{'s' * (self.nprocs != 1)}>"

    # ------------------------------------------------------------------ orders

    def _asked(self, ranks: Sequence[int] | None) -> list[RankState]:
        if self.lost:
            raise SessionLost(f"{self.lost}. Open a new session")
        if self._busy:
            raise NbddpError("the ranks are busy: wait until the current cell or call is done")
        for number in ranks or ():
            self._require(number)
        return [rank for rank in self._crew.ranks if ranks is None or rank.number in ranks]

    def _require(self, rank: int) -> None:
        if not 0 <= rank < self.nprocs:
            raise ValueError(f"there is no rank {rank} (nprocs={self.nprocs})")

    def _living(self, rank: int | None = None) -> RankState:
        """Return this rank, or the lowest, if it lives, also after the session's end."""
        for each in self._crew.ranks:
            if each.alive and rank in (None, each.number):
                return each
        if rank is not None:
            self._require(rank)
        raise SessionLost(self.lost or ("all ranks have ended" if rank is None else f"rank {rank} has ended"))

    @contextlib.contextmanager
    def _having_orders(self) -> Iterator[None]:
        self._busy = True
        try:
            yield
        finally:
            self._busy, self._present = False, None
            # The third interrupt, or our own failure: who knows what they do?
            if not all(rank.over for rank in self._crew.ranks):
                self._crew.kill(self._crew.ranks)
                self.close()

    def _order(
        self,
        order: Any,
        ranks: Sequence[RankState],
        page: Page,
        *,
        keep: bool = False,
        subject: str | None = None,
        codes: Sequence[CodeType] = (),
    ) -> Run[Any] | None:
        error: BaseException | None = None
        with self._having_orders():
            self._put_right_first(page)
            attempt = Attempt(self._crew, order, ranks, page, OF_A_SESSION, look=self._look)
            self._present = present = _Present(order, attempt, subject, time.monotonic())
            try:
                while self._early:
                    self._logged(*self._early.pop(0))
                if keep:
                    self._its_run(shown=isinstance(order, Function))
                attempt.follow()
                self._released |= attempt.released
                have_failed = any(rank.failed for rank in ranks)
                if have_failed and isinstance(order, Cell):
                    self._its_run()
                if present.run is not None:
                    present.run._note_ranks()
                if attempt.was_stopped and isinstance(order, Function):
                    take_partial_values(self._its_run(), self._crew)
                if attempt.was_stopped and (isinstance(order, Function) or not have_failed):
                    stop: Any = KeyboardInterrupt()  # what follows in the cell must not run
                    if isinstance(order, Cell):
                        stop._render_traceback_ = lambda: ["KeyboardInterrupt: the cell has come to its end"]
                    raise stop
                if isinstance(order, Function):
                    take_values(self._its_run(), self._crew, attempt, codes)
                elif have_failed:
                    error = self._error(attempt, ranks, order)
            except BaseException as raised:
                error = raised
                if all(rank.over for rank in self._crew.ranks):  # else it was the third interrupt
                    page.write_lines(self._put_right())
            finally:
                if present.run is not None:
                    is_stopped = attempt.was_stopped or type(error) is KeyboardInterrupt
                    state = "finished" if error is None else "stopped" if is_stopped else "failed"
                    present.run._conclude(state, error if state == "failed" else None)
        if isinstance(error, NbddpError):
            keep_ipythons_debugger_closed()
        if error is not None:
            raise error
        return present.run

    def _question(self, order: Any, ranks: Sequence[RankState], patience: Patience = OF_AN_ANSWER) -> dict[int, Any]:
        with self._having_orders():
            return self._ask(order, ranks, patience, in_a_cell=False)

    def _page(self, speaker: int) -> Page:
        page = super()._page(speaker)
        page.hear = self._hear
        return page

    def _hear(self, rank: int, said: Any) -> None:
        """The page answers a widget; its callbacks run on its rank, between cells."""
        if not self._busy and not self.lost:
            blobs = tuple(bytes(each) for each in said.get("buffers", ()))
            self._order(Hear(said["content"], blobs), self._asked([rank]), self._page(rank))

    def _logged(self, rank: int, records: list[Any]) -> None:
        if self._present is None:
            return self._early.append((rank, records))
        self._its_run(shown=True)._recording.add(rank, records)

    def _its_run(self, *, shown: bool = False) -> Run[Any]:
        """Return the present order's run; it's made when there is something to keep, or to show."""
        present = self._present
        assert present is not None
        order = present.order
        if present.run is None:
            name = f"In[{order.count}]" if isinstance(order, Cell) else getattr(order, "name", "session")
            settings = dataclasses.replace(self._settings, name=name)
            subject = earlier.cell() if present.subject is None else present.subject
            present.run = Run(settings, self._options, self._log_to, subject)
            if isinstance(order, Cell):
                show_lines_of(order)
            present.run._began, present.run.state = present.began, "running"
            present.run._take_part(self._crew, present.attempt)
        if shown and not present.is_shown and self._options.show is not False:
            present.is_shown = True
            present.run._show(self._options.show)
        return present.run

    def _look(self, attempt: Attempt) -> None:
        present = self._present
        assert present is not None
        if attempt.locator.hang or (isinstance(present.order, Cell) and time.monotonic() > present.began + _SHORT_S):
            self._its_run(shown=bool(attempt.locator.hang))
        if present.run is not None:
            present.run._draw()

    def _steps(self) -> list[int]:
        run = self._present.run if self._present is not None else None
        return run._steps() if run is not None else [-1] * self.nprocs

    # ------------------------------------------------------------------ failures

    def _put_right_first(self, page: Page) -> None:
        """Do what an interrupt may have ended after the last failure."""
        if self._released:
            page.write_lines(notes := self._put_right())
            if self.lost or self._released:
                raise NbddpError(notes[-1])

    @interrupts_to(lambda: None)
    def _put_right(self) -> list[str]:
        """Leave the ranks in one group, with nobody in the middle of anything. Returns what the user should know."""
        every = self._crew.ranks
        if dead := [rank for rank in every if not rank.alive]:
            ended = failure.error_of(dead[0], "session", self._crew)
            self.lost, self._released = str(ended).splitlines()[0], False
            return [
                f"The session is over: {self.lost}. %ddp pull works with those that are left; %ddp open starts new ones"
            ]
        try:
            counts = list(self._ask(CountCollectives(), every).values())
            groups = {group for count in counts for group in count}
            apart = any(len({count[group] for count in counts if group in count}) > 1 for group in groups)
            replaced = self._released = self._released or apart
            self._group += replaced
            stuck = self._ask(Mend(self._group if replaced else None), every)
        except NbddpError as error:
            return [f"The ranks couldn't recover: {in_a_line(error)}. Run %ddp close, then %ddp open"]
        self._released = False
        names = sorted({name for each in stuck.values() for name in each})
        if names and replaced:
            theirs = "its process group" if len(names) == 1 else "their process groups"
            return [f"Re-create {', '.join(names)}: the failure ended {theirs}"]
        return []

    def _refuse_torn(self, values: Mapping[str, Any]) -> None:
        """Refuse to push an optimizer apart from its model: the ranks would have two copies of the parameters."""
        for name, value in values.items():
            for parameter in _parameters(value):
                if missing := self._pushed.get(parameter, set()) - values.keys():
                    others, together = ", ".join(sorted(missing)), " and ".join(sorted({name, *missing}))
                    raise NbddpError(f"{name} shares parameters with {others}: push {together} together")

    def _note_pushed(self, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            for parameter in _parameters(value):
                self._pushed.setdefault(parameter, set()).add(name)


def _parameters(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.nn.Module):
        return list(value.parameters())
    if isinstance(value, torch.optim.Optimizer):
        return [parameter for group in value.param_groups for parameter in group["params"]]
    return []
