"""Cells, push, and pull on an open crew. What a ``Session`` and a fresh cell have in common, and the fresh cell."""

import abc
import ast
import contextlib
import linecache
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from IPython.core.compilerop import code_name
from IPython.core.inputtransformer2 import TransformerManager

from nbddp.errors import CellError, LaunchError, NbddpError, PayloadError
from nbddp.kernel import earlier, failure
from nbddp.kernel.advice import advice, refuse_launchers
from nbddp.kernel.attempt import OF_AN_ANSWER, Attempt, Patience
from nbddp.kernel.crew import Crew
from nbddp.kernel.interrupts import interrupts_to
from nbddp.kernel.page import Page
from nbddp.kernel.rank_state import RankState
from nbddp.kernel.run import Run
from nbddp.kernel.settings import Options, decide
from nbddp.kernel.start import follow_part, launch, pack
from nbddp.messages import Cell, Pull, Push, Ran, Render
from nbddp.panel.frontend import ipython
from nbddp.payload import Packed
from nbddp.text import ranks_text

_UNDEFINED = re.compile(r"name '(\w+)' is not defined")


class Cells(abc.ABC):
    """Gives orders to the IPythons of an open crew, one after the other."""

    _crew: Crew
    _options: Options

    @abc.abstractmethod
    def _order(self, order: Any, ranks: Sequence[RankState], page: Page, *, keep: bool = False) -> Run[Any] | None:
        """Give an order, and wait. Raises the first rank's failure, when the ranks can take the next order.

        Returns:
            The run that the order is or belongs to; None if nothing was worth one, unless it's to be kept.
        """

    def _put_right(self) -> list[str]:
        """After a failure, leave the ranks able to take orders, if there will be any. Returns what to tell the user."""
        return []

    def _leave(self) -> None:
        """The cell has called ``exit()``: these ranks end anyway."""
        return

    def _page(self, speaker: int) -> Page:
        return Page(self._crew.ranks, speaker, quiet=self._options.is_quiet)

    def _push(self, packed: Packed) -> None:
        order = Push(self._crew.note_definitions(packed), packed.block)
        self._order(order, self._crew.ranks, self._page(0))

    def _run_cell(
        self, cell: Cell, asked: Sequence[RankState], keep: bool, out: Sequence[str], into: dict[str, Any]
    ) -> None:
        """Run a cell, keep the last line's values, and bring these names back."""
        page = self._page(max(cell.speaker, 0))
        run = self._order(cell, asked, page, keep=keep)
        answers = {rank.number: rank.report.answer for rank in asked if rank.report is not None}
        if cell.speaker >= 0:
            page.show_where_ranks_differ(answers)
            if (shell := ipython()) is not None:
                for each in answers[cell.speaker].payload:
                    shell.payload_manager.write_payload(each)
        if run is not None:
            run._values = [self._value(rank, answers) if keep else None for rank in self._crew.ranks]
        try:
            if out:
                self._bring(out, into, asked[0])
        finally:
            if any(answer.leaving for answer in answers.values()):
                self._leave()

    def _value(self, rank: RankState, answers: Mapping[int, Ran]) -> Any:
        """Return what the cell's last line was on that rank; as a text if it can't be sent."""
        if rank.number not in answers or not answers[rank.number].value:
            return None
        try:
            return self._pull([""], rank)
        except PayloadError:
            return answers[rank.number].value

    def _pull(self, names: Sequence[str], rank: RankState) -> Any:
        self._order(Pull(tuple(names)), [rank], self._page(rank.number))
        found, report = rank.value(self._crew.definitions), rank.report
        if report is not None and report.lost:
            raise PayloadError(report.lost, report.path)
        return found[names[0]] if len(names) == 1 else tuple(found[name] for name in names)

    def _bring(self, names: Sequence[str], into: dict[str, Any], rank: RankState) -> None:
        """Pull names together; one by one if one of them can't be sent, so that the others arrive."""
        try:
            found = self._pull(names, rank)
            into.update(zip(names, found if len(names) > 1 else [found]))
        except PayloadError:
            if len(names) == 1:
                raise
            try:
                self._bring(names[:1], into, rank)
            finally:
                self._bring(names[1:], into, rank)

    def _ask(
        self, order: Any, ranks: Sequence[RankState], patience: Patience = OF_AN_ANSWER, *, in_a_cell: bool = True
    ) -> dict[int, Any]:
        """Give an order that doesn't run the user's code. Returns the answers.

        Args:
            in_a_cell: that has an error, which comes before an interrupt.
        """
        attempt = Attempt(self._crew, order, ranks, Page(self._crew.ranks, quiet=True), patience)
        attempt.follow()
        if attempt.interrupts and not in_a_cell:
            raise KeyboardInterrupt
        if any(rank.failed for rank in ranks):
            raise failure.error_of(failure.first(ranks), "session", self._crew)
        return {rank.number: rank.report.answer for rank in ranks if rank.report is not None}

    @interrupts_to(lambda: None)  # the cell has an error already
    def _error(self, attempt: Attempt, ranks: Sequence[RankState], order: Any) -> NbddpError:
        """Return the error of the first rank, and leave the ranks able to take orders."""
        first, crew = failure.first(ranks), self._crew
        name, text, shown, notes = "KeyboardInterrupt", "", None, []
        if first.failure is None:
            error = failure.error_of(first, "session", crew)
            name, text = type(error).__name__, str(error)
        elif not attempt.was_stopped:
            name, text = first.failure.kind, first.failure.text
            if not isinstance(order, Cell):
                return failure.error_of(first, "session", crew)
        alike = [rank.number for rank in ranks if rank is first or _failed_alike(rank, first)]
        notes.append(f"{ranks_text(alike)} of {len(crew.ranks)}")
        notes += [f"Where the ranks were: {attempt.where}"] if attempt.where else []
        steps = {rank.report.answer.steps for rank in ranks if rank.report and isinstance(rank.report.answer, Ran)}
        if len(steps) > 1 or any(each % 1 for each in steps):  # half a step was interrupted
            taken = f"{min(steps):.12g} to {max(steps):.12g}"
            notes.append(f"The ranks have taken {taken} optimizer steps, so their models differ")
        if first.report is not None and first.alive:
            with contextlib.suppress(NbddpError):  # it dies meanwhile
                shown = self._ask(Render(), [first])[first.number]
        notes += self._put_right()
        notes += filter(None, [advice(f"{name}: {text}", crew.device, first.number, alike=len(alike) == len(ranks))])
        shell = ipython()
        if (missing := _UNDEFINED.match(text)) and shell is not None and missing[1] in shell.user_ns:
            has = f"The notebook has {missing[1]}, but rank {first.number} doesn't"
            notes.append(f"{has}: run %ddp push {missing[1]}, or run its cell again")
        bases = (CellError, KeyboardInterrupt) if name == "KeyboardInterrupt" else (CellError,)
        raised: CellError = type(name, bases, {})(text)
        raised.rank = first.number
        raised.shown = [*(shown or [f"{name}: {text}"]), "", *notes]
        return raised


class _FreshCell(Cells):
    """Its orders are parts of one run."""

    def __init__(self, run: Run[Any], crew: Crew) -> None:
        self._run, self._crew, self._options = run, crew, run._options

    def _order(self, order: Any, ranks: Sequence[RankState], page: Page, *, keep: bool = False) -> Run[Any]:
        attempt = follow_part(self._run, self._crew, order, ranks, page)
        if any(rank.failed for rank in ranks):
            raise self._error(attempt, ranks, order)
        return self._run


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
    """Run a cell on fresh ranks, which has these values' names. Returns its run, as ``run``.

    Args:
        out: names of the first rank that come back, into a dict.
        keep: the run gets the values of the cell's last line.
    """
    count = cell_number()
    settings = decide(options.name or f"In[{count}]", options, cells=True)
    if wrong := [number for number in ranks or () if not 0 <= number < settings.world_size]:
        raise LaunchError(f"there is no rank {wrong[0]} (nprocs={settings.world_size})")
    refuse_launchers_in(source)
    packed = pack_names(values, options)

    def push_and_run(run: Run[Any], crew: Crew, packed: Packed) -> None:
        asked = [rank for rank in crew.ranks if ranks is None or rank.number in ranks]
        cell = Cell(source, count, asked[0].number if options.wait else -1, settings.post_mortem)
        show_lines_of(cell)
        fresh = _FreshCell(run, crew)
        fresh._push(packed)
        fresh._run_cell(cell, asked, keep, out, into)

    launched = launch(settings, packed, options, earlier.cell(), push_and_run)
    return launched.wait() if options.wait else launched


def refuse_launchers_in(source: str) -> None:
    """Raise LaunchError for a cell that starts ranks itself."""
    codes = []
    with contextlib.suppress(Exception), warnings.catch_warnings():  # the ranks say it
        warnings.simplefilter("ignore")
        transformed = TransformerManager().transform_cell(source)  # type: ignore[no-untyped-call]
        codes.append(compile(transformed, "cell", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT))
    refuse_launchers("this cell", codes, with_inner=False)


def show_lines_of(cell: Cell) -> None:
    """Let stacks of the ranks show the cell's lines: they have it under IPython's own name."""
    if (shell := ipython()) is not None:
        source = shell.transform_cell(cell.source)
        name = code_name(source, cell.count)
        linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name


def cell_number() -> int:
    """Return the number of the notebook's cell that runs."""
    shell = ipython()
    return shell.displayhook.prompt_count if shell is not None else 1  # IPython 9 counts on before the cell runs


def pack_names(values: Mapping[str, Any], options: Options) -> Packed:
    """Pack values with their names. Raises PayloadError with the name of what can't be sent."""
    return pack(values, values, "a variable can't be sent to the ranks", elsewhere=options.nnodes is not None)


def _failed_alike(rank: RankState, first: RankState) -> bool:
    mine, other = rank.failure, first.failure
    return mine is not None and other is not None and (mine.kind, mine.text) == (other.kind, other.text)
