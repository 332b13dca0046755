"""``Session``: a crew that stays open. Its ranks keep their names from one call to the next, also after a failure."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import linecache
import re
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from IPython.core.compilerop import code_name

from nbddp import payload
from nbddp.errors import CellError, LaunchError, NbddpError, PayloadError, SessionLost
from nbddp.kernel import earlier, failure
from nbddp.kernel.advice import advice
from nbddp.kernel.attempt import OF_A_RUN, OF_A_SESSION, OF_AN_ANSWER, Attempt, Patience
from nbddp.kernel.crew import Crew
from nbddp.kernel.interrupts import interrupts_to
from nbddp.kernel.page import Page, keep_ipythons_debugger_closed, notebook
from nbddp.kernel.rank_state import RankState
from nbddp.kernel.run import Run, in_lines_of_ranks
from nbddp.kernel.settings import Options, check_call, decide, takes_options
from nbddp.kernel.start import Machines, call_and_collect, launch, look, pack_call, raise_if_stopped
from nbddp.loggers.log_to import destinations
from nbddp.messages import Cell, Complete, CountCollectives, Hear, Inspect, Mend, Pull, Push, Ran, Render, Settings
from nbddp.payload import Block, Packed, explain
from nbddp.process.machine import LocalMachine
from nbddp.text import in_a_line, ranks_text

ONLY_OF_RUNS = ("timeout", "max_restarts", "stop_on_nan", "wait", "pdb")
_SHORT_S = 0.3  # a cell that takes longer is a run
_UNDEFINED = re.compile(r"name '(\w+)' is not defined")


class Session:
    """Ranks that stay.

    Attributes:
        nprocs: how many ranks it has.
        lost: why it's over; "" as long as it isn't.
    """

    @takes_options
    def __init__(self, *, options: Options) -> None:
        for name in ONLY_OF_RUNS:
            if getattr(options, name) != getattr(Options(), name):
                raise LaunchError(f"{name}= is an option of run(), not of a session")
        self._begin(decide(options.name or "session", options, attended=True), options, self._machines)

    def _begin(
        self,
        settings: Settings,
        options: Options,
        machines: Machines,
        only: Run[Any] | None = None,
        deadline: float = float("inf"),
    ) -> None:
        """Open it.

        Args:
            only: its only cell is this run, which has to be over at the deadline.
        """
        self._settings, self._options, self.nprocs, self.lost = settings, options, settings.world_size, ""
        self._only, self._deadline = only, deadline
        self._log_to = destinations(options.log_to)
        self._busy = self._closed = False
        self._group, self._released = 0, False  # the default one's number; does it have to be replaced?
        self._attempt: Attempt | None = None  # at the present order; while run() goes on, its run has it
        self._began = 0.0  # when it was given
        self._early: list[tuple[int, list[Any]]] = []  # what threads of the ranks have logged between cells
        self._sent: dict[int, tuple[weakref.ref[Any], set[str]]] = {}  # parameters, with the names they went under
        self._received: list[Any] = []  # classes and functions that the ranks have been sent
        self._cell: Cell | None = None  # the present call, if it's one
        self._run: Run[Any] | None = None  # of the present call, as soon as there is something to record
        self._is_shown = False  # and it has had a view
        self._crew = Crew(dataclasses.replace(settings, shell=_shell_settings()), machines())
        try:
            self._crew.open()
            if only is None:  # an interrupt ends ranks that aren't ready
                self._ask(CountCollectives(), self._crew.ranks, OF_A_SESSION)
                atexit.register(self.close)
        except BaseException:
            self.close()
            raise

    _machines: Callable[[], Sequence[Any]] = staticmethod(lambda: [LocalMachine()])

    # ------------------------------------------------------------------ for the user

    def cell(self, source: str, ranks: Sequence[int] | None = None, *, pdb: bool = False, keep: bool = False) -> None:
        """Run a cell in the IPython of all ranks, or of these. Raises an error named as the first rank's.

        Args:
            pdb: an error opens the debugger.
            keep: the cell is ``last_run()``, with its last line's values. Otherwise, that's a cell that has logged
                something, took a while, or failed; and it has no values.
        """
        asked = self._asked(ranks)
        self._run_cell(Cell(source, _number(), asked[0].number, pdb), asked, keep)

    def _run_cell(
        self,
        cell: Cell,
        asked: Sequence[RankState],
        keep: bool,
        out: Sequence[str] = (),
        into: dict[str, Any] | None = None,
    ) -> None:
        page = self._page(max(cell.speaker, 0))
        self._call(cell, asked, page, keep=keep)
        run, answers = self._run, {rank.number: rank.report.answer for rank in asked if rank.report is not None}
        if cell.speaker >= 0:
            page.show_where_ranks_differ(answers)
        if cell.speaker >= 0 and (shell := notebook()) is not None:
            for each in answers[cell.speaker].payload:
                shell.payload_manager.write_payload(each)
        if out and into is not None:
            self._bring(out, into, asked[0].number)
        if run is not None:
            run._values = [self._value(rank, answers) if keep else None for rank in range(self.nprocs)]
        if any(answer.leaving for answer in answers.values()):
            self.close()

    def _value(self, rank: int, answers: Mapping[int, Ran]) -> Any:
        """Return what the cell's last line was on that rank; as a text if it can't be sent."""
        if rank not in answers or not answers[rank].value:
            return None
        try:
            return self.pull("", rank=rank)
        except PayloadError:
            return answers[rank].value

    def run(
        self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Run[Any]:
        """Call a function on all ranks. Returns the run; raises as ``nbddp.run``."""
        asked = self._asked(None)
        name = check_call(fn, args, kwargs or {}, None)
        packed = pack_call(name, fn, tuple(args), dict(kwargs or {}))
        run: Run[Any] = Run(dataclasses.replace(self._settings, name=name), self._log_to, subject=earlier.function(fn))
        self._run, received, page = run, self._note_received(packed.by_value), self._page(0)
        call: dict[str, Any] = {"patience": OF_A_SESSION, "received": received}
        with self._calling(), packed.block:
            try:
                if self._options.show is not False:
                    run._show(self._options.show)
                self._put_right_first(asked, page)
                call_and_collect(run, self._crew, Packed(packed.block, self._received), page, **call)
                run._conclude("finished")
            except BaseException as error:
                was_stopped, attempt = isinstance(error, KeyboardInterrupt), run._attempt
                self._released |= attempt is not None and attempt.released
                run._conclude("stopped" if was_stopped else "failed", None if was_stopped else error)
                if all(rank.over for rank in asked):  # else it was the third interrupt
                    self._write_notes(page, self._put_right(asked))
                if not isinstance(error, NbddpError):
                    raise
                keep_ipythons_debugger_closed()
            finally:
                self._crew.metrics_to = self._logged
        return run.wait()

    def push(self, **values: Any) -> None:
        """Bind these names on all ranks. Values that share something have to go together."""
        self._refuse_torn(values)
        with (packed := _pack_names(values)).block:
            self._push(packed)
        self._note_sent(values)

    def _push(self, packed: Packed) -> None:
        asked, received = self._asked(None), self._note_received(packed.by_value)
        self._call(Push(received), asked, self._page(0), packed.block)

    def pull(self, *names: str, rank: int | None = None) -> Any:
        """Return the value of a name on the lowest rank that lives, or on this one; a tuple for several names.

        Raises:
            PayloadError: one of them can't be sent.
        """
        alive = [each for each in self._crew.ranks if each.alive and rank in (None, each.number)]
        if not alive:
            raise SessionLost(self.lost or f"there is no rank {rank} (0 to {self.nprocs - 1})")
        self._call(Pull(names), alive[:1], self._page(alive[0].number))
        found, report = alive[0].value(self._received), alive[0].report
        if report is not None and report.lost:
            raise PayloadError(report.lost, report.path)
        return found[names[0]] if len(names) == 1 else tuple(found[name] for name in names)

    def _bring(self, names: Sequence[str], into: dict[str, Any], rank: int | None = None) -> None:
        """Pull names together; one by one if one of them can't be sent, so that the others arrive."""
        try:
            found = self.pull(*names, rank=rank)
            into.update(zip(names, found if len(names) > 1 else [found]))
        except PayloadError:
            if len(names) == 1:
                raise
            try:
                self._bring(names[:1], into, rank)
            finally:
                self._bring(names[1:], into, rank)

    def complete(self, code: str, cursor: int) -> dict[str, Any]:
        """Return rank 0's completions, as a kernel replies."""
        return self._ask(Complete(code, cursor), self._asked([0]))[0]  # type: ignore[no-any-return]

    def inspect(self, code: str, cursor: int, level: int = 0) -> dict[str, Any]:
        """Describe an object of rank 0, as a kernel replies."""
        return self._ask(Inspect(code, cursor, level), self._asked([0]))[0]  # type: ignore[no-any-return]

    def logs(self, rank: int | None = None) -> str:
        """Return what that rank has printed since its start; of all ranks, each line with its rank."""
        return in_lines_of_ranks(self.nprocs, self.logs) if rank is None else self._crew.ranks[rank].output.text()

    @property
    def is_busy(self) -> bool:
        """Whether the ranks have an order."""
        return self._busy

    def close(self) -> None:
        """End the ranks."""
        if self._closed:
            return
        self._closed, self.lost = True, "the session is closed"
        atexit.unregister(self.close)
        try:
            if all(rank.alive and rank.ready for rank in self._crew.ranks):
                self._crew.dismiss(lambda: self._only is not None and self._only._stop_grace_s is not None)
        finally:
            self._crew.end()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is not None:  # it doesn't wait for threads and children that the ranks have left, as in a run
            self._crew.kill(self._crew.ranks)
        self.close()

    def __repr__(self) -> str:
        return f"<Session: {self.lost or 'open'}, {self.nprocs} ranks>"

    # ------------------------------------------------------------------ calls

    def _asked(self, ranks: Sequence[int] | None) -> list[RankState]:
        if self.lost:
            raise SessionLost(self.lost)
        if self._busy:
            raise NbddpError("the ranks are busy")
        if ranks is not None and (wrong := [number for number in ranks if not 0 <= number < self.nprocs]):
            raise ValueError(f"there is no rank {wrong[0]} (0 to {self.nprocs - 1})")
        return [rank for rank in self._crew.ranks if ranks is None or rank.number in ranks]

    @contextlib.contextmanager
    def _calling(self) -> Iterator[None]:
        self._busy = True
        try:
            yield
        except BaseException:  # if ranks aren't over, the third interrupt, or our own failure: who knows what they do
            if not self.lost and not all(rank.over for rank in self._crew.ranks):
                self._crew.kill(self._crew.ranks)
                self.close()
            raise
        finally:
            self._busy, self._attempt = False, None

    def _call(
        self, order: Any, ranks: Sequence[RankState], page: Page, block: Block | None = None, keep: bool = False
    ) -> None:
        """Give an order, and wait. Raises the first rank's failure, when the ranks can take the next order."""
        attempt = Attempt(
            self._crew,
            order,
            ranks,
            page,
            OF_A_SESSION if self._only is None else OF_A_RUN,
            payload=block,
            deadline=self._deadline,
            look=self._look,
            steps=self._steps,
        )
        error = None
        self._cell = order if isinstance(order, Cell) else None
        self._began = time.monotonic()
        self._run, self._is_shown = self._only, self._only is not None
        with self._calling():
            self._attempt = attempt
            try:
                if self._only is not None:
                    self._only._take_part(self._crew, attempt)
                    if self._cell is not None:
                        _show_lines_of(self._cell)
                else:
                    self._crew.metrics_to = self._logged
                while self._early:
                    self._logged(*self._early.pop(0))
                if keep:
                    self._record()
                self._put_right_first(ranks, page)
                attempt.follow()
                self._released |= attempt.released
                if self._only is not None:
                    raise_if_stopped(self._only, attempt, self._options.timeout, self._options.stop_on_nan)
                if any(rank.failed for rank in ranks):
                    if self._cell is not None:
                        self._record()
                    if self._run is not None:
                        self._run._note_ranks()
                    error = self._error(attempt, ranks, order)
                elif attempt.was_stopped:  # what follows in the cell must not run
                    self._write_notes(page, self._put_right(ranks))
                    raise KeyboardInterrupt
            except BaseException as broken:
                self._conclude_run("stopped" if isinstance(broken, KeyboardInterrupt) else "failed", broken)
                raise
            self._conclude_run("finished" if error is None else "stopped" if attempt.was_stopped else "failed", error)
        if error is not None:
            keep_ipythons_debugger_closed()
            raise error

    def _conclude_run(self, state: str, error: BaseException | None) -> None:
        if self._only is not None:
            return  # what carries it out does
        try:
            if self._run is not None:
                self._run._conclude(state, error if state == "failed" else None)
        finally:
            self._crew.metrics_to = self._logged

    def _ask(self, order: Any, ranks: Sequence[RankState], patience: Patience = OF_AN_ANSWER) -> dict[int, Any]:
        """Give an order that doesn't run the user's code. Returns the answers."""
        attempt = Attempt(self._crew, order, ranks, Page(self._crew.ranks, quiet=True), patience)
        within = self._busy  # a call, whose error comes first
        with contextlib.nullcontext() if within else self._calling():
            attempt.follow()
            if attempt.interrupts and not within:
                raise KeyboardInterrupt
        if any(rank.failed for rank in ranks):
            raise self._error_of(failure.first(ranks))
        return {rank.number: rank.report.answer for rank in ranks if rank.report is not None}

    def _page(self, speaker: int) -> Page:
        quiet = self._options.show is False or not self._options.wait
        return Page(self._crew.ranks, speaker, quiet=quiet, hear=self._hear)

    def _hear(self, rank: int, said: Any) -> None:
        """The page answers a widget; its callbacks run on its rank, between cells."""
        if not self._busy and not self.lost:
            blobs = tuple(bytes(each) for each in said.get("buffers", ()))
            self._call(Hear(said["content"], blobs), self._asked([rank]), self._page(rank))

    def _logged(self, rank: int, records: list[Any]) -> None:
        if self._attempt is None:
            return self._early.append((rank, records))
        self._record(shown=True).history.add(rank, records)

    def _record(self, *, shown: bool = False) -> Run[Any]:
        """Return the present call's run; it's made when there is something to record, or to show."""
        if self._run is None:
            assert self._attempt is not None
            name = f"In[{self._cell.count}]" if self._cell is not None else "session"
            settings = dataclasses.replace(self._settings, name=name)
            self._run = Run(settings, self._log_to, subject=earlier.cell())
            if self._cell is not None:
                _show_lines_of(self._cell)
            self._run._began = self._began
            self._run._take_part(self._crew, self._attempt)
            self._run.state, self._crew.metrics_to = "running", self._logged
        if shown and not self._is_shown and self._options.show is not False:
            self._is_shown = True
            self._run._show(self._options.show)
        return self._run

    def _look(self, attempt: Attempt) -> None:
        if self._only is not None:
            return look(self._only, self._crew, OF_A_RUN, self._options.stop_on_nan, attempt)
        if attempt.locator.hang or (self._cell is not None and time.monotonic() > self._began + _SHORT_S):
            self._record(shown=bool(attempt.locator.hang))
        if self._run is not None:
            self._run._draw()

    def _steps(self) -> list[int]:
        return self._run._steps() if self._run is not None else [-1] * self.nprocs

    # ------------------------------------------------------------------ failures

    @interrupts_to(lambda: None)  # the cell has an error already
    def _error(self, attempt: Attempt, ranks: Sequence[RankState], order: Any) -> BaseException:
        """Return the error of the first rank, and leave the ranks able to take orders."""
        first = failure.first(ranks)
        name, text, shown, notes = "KeyboardInterrupt", "", None, []
        if first.failure is None:
            error = self._error_of(first)
            name, text = type(error).__name__, str(error)
        elif not attempt.was_stopped:
            name, text = first.failure.kind, first.failure.text
            if not isinstance(order, Cell):
                return self._error_of(first, ranks)
        alike = [rank.number for rank in ranks if rank is first or self._failed_alike(rank, first)]
        notes.append(f"{ranks_text(alike)} of {self.nprocs}")
        notes += [f"It was here: {attempt.where}"] if attempt.where else []
        steps = {rank.report.answer.steps for rank in ranks if rank.report and isinstance(rank.report.answer, Ran)}
        if len(steps) > 1:
            notes.append(f"The ranks have taken {min(steps)} to {max(steps)} optimizer steps, so their models differ")
        if first.report is not None and first.alive:
            with contextlib.suppress(NbddpError):  # it dies meanwhile
                shown = self._ask(Render(), [first])[first.number]
        notes += self._put_right(ranks)
        notes += filter(None, [advice(text, self._crew.device)])
        shell = notebook()
        if (missing := _UNDEFINED.match(text)) and shell is not None and missing[1] in shell.user_ns:
            notes.append(f"The notebook has {missing[1]}: %ddp push {missing[1]}, or run its cell again")
        kind = KeyboardInterrupt if name == "KeyboardInterrupt" else CellError
        raised: CellError = type(name, (CellError, kind) if kind is KeyboardInterrupt else (CellError,), {})(text)
        raised.rank = first.number
        raised.shown = [*(shown or [f"{name}: {text}"]), "", *notes]
        return raised

    def _error_of(self, rank: RankState, ranks: Sequence[RankState] | None = None) -> NbddpError:
        crew = self._crew
        return failure.error_of(rank, "session", ranks or crew.ranks, self._received, crew.device)

    @staticmethod
    def _failed_alike(rank: RankState, first: RankState) -> bool:
        mine, other = rank.failure, first.failure
        return mine is not None and other is not None and (mine.kind, mine.text) == (other.kind, other.text)

    def _put_right_first(self, ranks: Sequence[RankState], page: Page) -> None:
        """Do what an interrupt may have ended after the last failure."""
        if self._released:
            self._write_notes(page, notes := self._put_right(ranks))
            if self.lost or self._released:
                raise NbddpError(notes[-1])

    @interrupts_to(lambda: None)
    def _put_right(self, ranks: Sequence[RankState]) -> list[str]:
        """Leave the ranks in one group, with nobody in the middle of anything. Returns what the user should know."""
        every = self._crew.ranks
        if self._only is not None:
            return []
        if dead := [rank for rank in every if not rank.alive]:
            ended = self._error_of(dead[0])
            self.lost, self._released = str(ended).splitlines()[0], False
            return [f"The session is over: {self.lost}. %ddp pull NAME brings what the others have"]
        try:
            counts = list(self._ask(CountCollectives(), every).values())
            groups = {group for count in counts for group in count}
            apart = any(len({count[group] for count in counts if group in count}) > 1 for group in groups)
            replaced = self._released = self._released or apart
            self._group += replaced
            stuck = self._ask(Mend(self._group if replaced else None), every)
        except NbddpError as error:
            return [f"The ranks could not be put right, so %ddp close and open again: {in_a_line(error)}"]
        self._released = False
        names = sorted({name for each in stuck.values() for name in each})
        if names and replaced:
            return [f"Make again: {', '.join(names)}; the failure has ended process groups"]
        return []

    def _refuse_torn(self, values: Mapping[str, Any]) -> None:
        """Refuse to push an optimizer apart from its model: the ranks would have two copies of the parameters."""
        for name, value in values.items():
            for parameter in _parameters(value):
                before, names = self._sent.get(id(parameter), (lambda: None, set()))
                if before() is parameter and (missing := names - values.keys()):
                    together = " and ".join(sorted({name, *missing}))
                    raise NbddpError(
                        f"{name} shares parameters with {', '.join(sorted(missing))}: push {together} together"
                    )

    def _note_received(self, by_value: Sequence[Any]) -> int:
        """Note what the ranks are about to be sent. Returns how much they have been sent before."""
        before = len(self._received)
        self._received += by_value
        return before

    @staticmethod
    def _write_notes(page: Page, notes: Sequence[str]) -> None:
        if notes:
            page.write("".join(f"{note}\n" for note in notes))

    def _note_sent(self, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            for parameter in _parameters(value):
                kept = self._sent.get(id(parameter))
                names = kept[1] if kept is not None and kept[0]() is parameter else set()
                self._sent[id(parameter)] = weakref.ref(parameter), names | {name}


def launch_cell(
    source: str,
    values: Mapping[str, Any],
    out: Sequence[str],
    into: dict[str, Any],
    ranks: Sequence[int] | None = None,
    *,
    keep: bool = False,
    options: Options,
) -> Run[Any]:
    """Run a cell on fresh ranks, a session of one cell, which has these values' names. Returns its run, as ``run``.

    Args:
        out: names of the first rank that come back, into a dict.
        keep: the run gets the values of the cell's last line.
    """
    count, packed = _number(), _pack_names(values)

    def call(
        run: Run[Any],
        settings: Settings,
        packed: Packed,
        options: Options,
        machines: Machines,
        deadline: float,
    ) -> None:
        session = Session.__new__(Session)
        session._begin(settings, options, machines, run, deadline)
        with session:
            session._push(packed)
            asked = session._asked(ranks)
            speaker = asked[0].number if options.wait else -1
            session._run_cell(Cell(source, count, speaker, settings.post_mortem), asked, keep, out, into)

    settings = decide(options.name or f"In[{count}]", options, attended=options.wait)
    if wrong := [number for number in ranks or () if not 0 <= number < settings.world_size]:
        raise LaunchError(f"there is no rank {wrong[0]} (0 to {settings.world_size - 1})")
    launched = launch(settings, packed, options, earlier.cell(), call)
    return launched.wait() if options.wait else launched


def _show_lines_of(cell: Cell) -> None:
    """Let stacks of the ranks show the cell's lines: they have it under IPython's own name."""
    if (shell := notebook()) is not None:
        source = shell.transform_cell(cell.source)
        name = code_name(source, cell.count)
        linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name


def _number() -> int:
    """Return the number of the notebook's cell that runs."""
    shell = notebook()
    return shell.execution_count - 1 if shell is not None else 1


def _pack_names(values: Mapping[str, Any]) -> Packed:
    try:
        return payload.pack(values)
    except Exception as error:  # whatever a user's __reduce__ raises
        raise explain.explained(dict(values), error, what="this cannot be sent to the ranks") from error


def _parameters(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.nn.Module):
        return list(value.parameters())
    if isinstance(value, torch.optim.Optimizer):
        return [parameter for group in value.param_groups for parameter in group["params"]]
    return []


def _shell_settings() -> dict[str, Any]:
    """Return how the notebook's IPython shows things."""
    shell = notebook()
    if shell is None:
        return {}
    return {
        "is_kernel": "IPKernelApp" in shell.config,
        "colors": shell.colors,
        "ast_node_interactivity": shell.ast_node_interactivity,
        "call_pdb": shell.call_pdb,
    }
