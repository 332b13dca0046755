"""One prompt under the cell for all ranks that ask the same: ``input()``, pdb, %debug."""

import builtins
import getpass
import re
import signal
import threading
import time
from collections.abc import Callable, Sequence

from nbddp.kernel.crew import Crew
from nbddp.kernel.interrupts import interrupts_to
from nbddp.kernel.page import Page
from nbddp.kernel.rank_state import RankState
from nbddp.messages import Answer
from nbddp.text import ranks_text

_OTHERS_S = 0.05  # for the other ranks to ask the same
_AGAIN_S = 0.5  # for those that have got an answer to ask again: they may wait in a collective
_SKIPPED = "debugger skipped: no interactive input here\n"
_DEBUGGERS = ("(Pdb) ", "ipdb> ")
_RANK = re.compile(r"rank\s+(\d+|all)\s*$")


class _RankEnded(Exception):
    """While the prompt was open."""


class Prompt:
    """Reads a line for the ranks that ask for one, and answers them."""

    def __init__(self, crew: Crew, ranks: Sequence[RankState], page: Page) -> None:
        self._crew, self._ranks, self._page = crew, ranks, page
        self._only: int | None = None  # of the ranks, in a debugger
        self._answered: Sequence[RankState] = ()  # the last time
        self._answered_at = 0.0
        self._has_skipped = False

    def serve(self, stop: Callable[[], None]) -> None:
        """Ask once for all ranks at one prompt, a moment after the first of them. An interrupt stops the order."""
        asking = [rank for rank in self._ranks if rank.prompt is not None and not rank.over]
        wait_s = _AGAIN_S if any(rank.prompt is None and not rank.over for rank in self._answered) else _OTHERS_S
        since = max(self._answered_at, min((rank.asked_at for rank in asking), default=0.0))
        if not asking or time.monotonic() < since + wait_s:
            return
        first = next((rank for rank in asking if rank.number == self._only), asking[0])
        prompt = first.prompt or ""
        alike = [first] if first.number == self._only else [rank for rank in asking if rank.prompt == prompt]
        try:
            line: str | None = self._read(prompt, alike)
        except _RankEnded:
            return  # and so has its question, perhaps
        except KeyboardInterrupt:
            stop()
            return
        except Exception:  # StdinNotImplementedError, EOFError: nobody can answer here
            line = self._skip(first) if prompt in _DEBUGGERS else None
        if prompt in _DEBUGGERS and line is not None and (chosen := _RANK.match(line)):
            self._choose(chosen[1])
            return
        for rank in alike:
            rank.prompt = None
        self._crew.send(Answer(line), alike)
        self._answered, self._answered_at = alike, time.monotonic()

    def _read(self, prompt: str, ranks: Sequence[RankState]) -> str:
        if threading.current_thread() is not threading.main_thread():
            raise EOFError
        self._page.show_differences(ranks)
        numbers = [rank.number for rank in ranks]
        named = prompt if len(numbers) == len(self._ranks) else f"[{ranks_text(numbers)}] {prompt}"
        if prompt in _DEBUGGERS:
            named = f"{ranks_text(numbers)} {prompt}"
        ended, closed, lock = threading.Event(), threading.Event(), threading.Lock()

        def leave_prompt() -> None:
            with lock:  # an interrupt after the prompt would be the user's
                if not (ended.is_set() or closed.is_set()):
                    ended.set()
                    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)  # type: ignore[arg-type]

        try:
            with interrupts_to(lambda: signal.default_int_handler(signal.SIGINT, None)):
                self._crew.on_exit = leave_prompt
                try:
                    if not self._crew.inbox.empty():  # that a rank has ended, perhaps
                        raise _RankEnded
                    return (getpass.getpass if any(rank.hides for rank in ranks) else builtins.input)(named)
                finally:
                    with lock:
                        closed.set()
        except KeyboardInterrupt:
            if ended.is_set():
                raise _RankEnded from None
            raise
        finally:
            self._crew.on_exit = None
            self._crew.moved_at = time.monotonic()  # what stood still waited for the user

    def _skip(self, rank: RankState) -> str:
        """Let the ranks go on, and say so once: in the cell, and in what the rank has printed."""
        if not self._has_skipped:
            self._has_skipped = True
            rank.output.add(_SKIPPED.encode())
            self._page.tell(_SKIPPED)
        return "c"

    def _choose(self, word: str) -> None:
        self._only = None if word == "all" else int(word)
        if self._only is not None and self._only not in {rank.number for rank in self._ranks}:
            self._page.write(f"There is no rank {word} here, only {ranks_text([r.number for r in self._ranks])}.\n")
            self._only = None
