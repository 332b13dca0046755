"""The debugger's prompt under a cell: which ranks it stands for, and what a line typed there does."""

from __future__ import annotations

import builtins
import itertools
import re
import time
from collections.abc import Callable, Sequence

from nbddp.kernel.dialog import Stop
from nbddp.kernel.supervisor import Supervisor
from nbddp.text import first_line, ranks_text

_OTHERS_S = 0.06  # for the other ranks of a program to reach the same breakpoint
_SOON_S = 0.3  # for a rank to stop, unless it is in a long call of C code
_STEP_S = 0.5  # for the ranks that were sent on together to stop again
_POLL_S = 0.002
_UNDER_WAY = ("starting", "running")
_NEWLINE = "\n"
_QUIT = ("q", "quit", "exit", "EOF")
_RANK = re.compile(r"rank(\s+\w+)?")  # and not "rank == 0", which is Python
_PDB = re.compile(r"\(+Pdb\)+ ")
_NO_STDIN = ("StdinNotImplementedError", "EOFError")


class Prompt:
    """The prompt of one run, while a cell waits for the run."""

    def __init__(self, supervisor: Supervisor, stop: Callable[[], None]) -> None:
        """
        Args:
            stop: requests the end of the run.
        """
        self._supervisor = supervisor
        self._state = supervisor.state
        self._dialog = self._state.dialog
        self._stop = stop
        self._only: int | None = None  # commands go to this rank alone
        self._places: dict[int, str] = {}  # of the ranks that the last prompt was for
        self._announced: dict[int, float] = {}  # stops that have been shown, by rank: when it stopped

    def serve(self, update: Callable[[], None]) -> None:
        """Read and carry out commands as long as a rank is stopped. Raises KeyboardInterrupt for an interrupt.

        Args:
            update: shows the run as it is now.
        """
        while stops := self._gathered():
            update()
            self._show_farewells()
            self._show(stops)
            ranks = self._ranks_of_prompt(stops)
            line = self._read(ranks, stops)
            if line is not None:
                self._carry_out(line, ranks, stops)
        self._show_farewells()

    def look(self, rank: int) -> None:
        """Stop this rank of a run in the background, and serve until it goes on, or the run is over.

        Raises:
            KeyboardInterrupt: the cell was interrupted; the rank goes on.
        """
        self._dialog.attended = True
        try:
            self._dialog.look(rank, self._state.wake)
            if not self._supervisor.join(_SOON_S, self._dialog.has_stops) and not self._dialog.has_stops():
                _print(f"rank {rank} stops at its next line of Python. It is here now:\n{self._supervisor.stacks()}\n")
            while self._dialog.coming() or self._dialog.has_news():
                if self._supervisor.join(None, self._dialog.has_news):
                    break
                self.serve(lambda: None)
        finally:
            self._dialog.attended = False
            self._answer(self._dialog.stops(), None)

    def _gathered(self) -> dict[int, Stop]:
        """Return the ranks that are stopped, after a moment in which others may follow."""
        began = time.monotonic()
        while stops := self._dialog.stops():
            if time.monotonic() >= began + self._wait_s(stops):
                break
            time.sleep(_POLL_S)
        self._places |= {rank: stop.place for rank, stop in stops.items()}
        return stops

    def _wait_s(self, stops: dict[int, Stop]) -> float:
        """Return how long to wait for ranks that have not stopped yet."""
        if self._dialog.coming(_STEP_S):
            return _STEP_S
        have_moved = any(self._places.get(rank) != stop.place for rank, stop in stops.items())
        others = sum(state in _UNDER_WAY for state in self._state.rank_states()) - len(stops)
        return _OTHERS_S if have_moved and others else 0.0

    def _ranks_of_prompt(self, stops: dict[int, Stop]) -> list[int]:
        """Return the ranks that the next command goes to: one, or all that have stopped at one line."""
        if self._only in stops:
            return [self._only]
        first = stops[min(stops)]
        return sorted(rank for rank, stop in stops.items() if _together(stop, first))

    # ------------------------------------------------------------------ what is shown

    def _show_farewells(self) -> None:
        for rank, text in self._dialog.farewells():
            self._announced.pop(rank, None), self._places.pop(rank, None)
            if text:
                _print(text)

    def _show(self, stops: dict[int, Stop]) -> None:
        """Print what the ranks that have stopped since the last time say, once for all that say the same."""
        new = [stop for rank, stop in sorted(stops.items()) if self._announced.get(rank) != stop.at]
        self._announced |= {stop.rank: stop.at for stop in new}
        groups = _grouped(new, lambda stop: stop.text)
        for same in groups:
            text = same[0].text
            if text and (len(groups) > 1 or (len(stops) > 1 and len(same) < len(stops))):
                _print(f"{_names(same)}:{' ' if text.count(_NEWLINE) == 1 else _NEWLINE}{text}")
            elif text:
                _print(text)

    def _read(self, ranks: Sequence[int], stops: dict[int, Stop]) -> str | None:
        here = [stops[rank] for rank in ranks]
        prompt = here[0].prompt
        named = f"{_names(here)} {prompt}"
        try:
            return self._dialog.ask(ranks, lambda: builtins.input(named))
        except Exception as error:
            if type(error).__name__ not in _NO_STDIN:
                raise
            self._answer(stops, None)  # the front end has no way to ask, or no more lines
            _print("[breakpoints are skipped from here on: nobody can answer]\n")
            return None

    # ------------------------------------------------------------------ commands

    def _carry_out(self, line: str, ranks: Sequence[int], stops: dict[int, Stop]) -> None:
        words = line.split()
        if not words or not _PDB.fullmatch(stops[ranks[0]].prompt):
            return self._answer(ranks, line)
        command = words[0]
        if _RANK.fullmatch(line.strip()):
            return self._go_to(words[1:], stops)
        if command == "ranks" and len(words) == 1:
            return _print(self._supervisor.stacks().partition("\n\n")[0] + "\n" + _where(stops))
        if command == "all" and len(words) > 1:
            line, ranks = line.partition("all")[2].strip(), sorted(stops)
        if _quits(line) and not stops[ranks[0]].error:
            self._stop()
            self._supervisor.join()
            return None
        return self._answer(ranks, line)

    def _answer(self, ranks: Sequence[int] | dict[int, Stop], line: str | None) -> None:
        self._dialog.answer(ranks, line, self._state.wake)

    def _go_to(self, words: Sequence[str], stops: dict[int, Stop]) -> None:
        if words == ["all"]:
            self._only = None
        elif len(words) == 1 and words[0].isdigit() and int(words[0]) in stops:
            self._only = int(words[0])
            _print(f"{_names([stops[self._only]])} at {stops[self._only].place}\n")
        elif len(words) == 1 and words[0].isdigit():
            _print(f"rank {words[0]} has not stopped; 'ranks' says where it is\n")
        else:
            _print("rank N goes to that rank's prompt, rank all back to all; p rank shows the variable\n")


def _quits(line: str) -> bool:
    """Return whether one of the commands in ``line`` ends pdb: ``p loss;;q``."""
    return any(command.strip() in _QUIT for command in line.split(";;"))


def _together(a: Stop, b: Stop) -> bool:
    return (a.place, a.prompt, a.error) == (b.place, b.prompt, b.error)


def _grouped(stops: Sequence[Stop], key: Callable[[Stop], object]) -> list[list[Stop]]:
    ordered = sorted(stops, key=lambda stop: (str(key(stop)), stop.rank))
    return sorted((list(same) for _, same in itertools.groupby(ordered, key)), key=lambda same: same[0].rank)


def _names(stops: Sequence[Stop]) -> str:
    """``rank 2 on node2``, ``ranks 0-3``."""
    numbers = [stop.rank for stop in stops]
    host = f" on {stops[0].host}" if len(stops) == 1 and stops[0].host else ""
    return ranks_text(numbers) + host


def _where(stops: dict[int, Stop]) -> str:
    lines = []
    for same in _grouped(list(stops.values()), lambda stop: (stop.place, stop.error)):
        error = f": {first_line(same[0].error)}" if same[0].error else ""
        lines.append(f"stopped: {_names(same)} at {same[0].place}{error}")
    return "\n".join(lines) + "\n"


def _print(text: str) -> None:
    builtins.print(text, end="", flush=True)
