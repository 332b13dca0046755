"""The talk between the debugger of a run's ranks and the cell that answers: who has stopped where, who is to go on.

The run's own thread carries messages from and to the ranks (``exchange``); the cell's thread answers (``Prompt``).
"""

from __future__ import annotations

import _thread
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from nbddp import wire
from nbddp.kernel import failure
from nbddp.kernel.stacks import Location
from nbddp.launch.dumps import Frame
from nbddp.launch.interface import Rank

_SKIPPED = "{} skipped: nobody can answer here"


@dataclass(frozen=True)
class Stop:
    """One rank that has stopped in the debugger.

    Attributes:
        text: what the debugger has printed since the last answer.
        prompt: pdb's, "(Pdb) ".
        place: "train, line 14".
        error: the type and text of the exception that stopped it; "" at a breakpoint.
        at: when it stopped (monotonic).
    """

    rank: int
    host: str | None
    text: str
    prompt: str
    place: str
    error: str
    at: float


class Dialog:
    """What the debugger of a run's ranks says, and what it is answered.

    Attributes:
        attended: somebody can answer. Otherwise ranks do not stop.
    """

    def __init__(self, nudge: Callable[[], None]) -> None:
        """
        Args:
            nudge: wakes the cell's thread.
        """
        self.attended = False
        self._nudge = nudge
        self._stops: dict[int, Stop] = {}
        self._sent: dict[int, float] = {}  # ranks that were answered and have not stopped again or gone on, and when
        self._farewells: list[tuple[int, str]] = []
        self._answers: queue.SimpleQueue[tuple[int, str | None]] = queue.SimpleQueue()
        self._looks: queue.SimpleQueue[int] = queue.SimpleQueue()  # ranks that are to stop
        self._undelivered: dict[int, list[wire.Look | wire.HoldTimeouts]] = {}  # until the rank calls its function
        self._told_skipped = self._timeouts_held = self._ending = False
        self._lock = _thread.allocate_lock()
        self._at_prompt: tuple[int, frozenset[int]] | None = None  # the thread that waits there, and for which ranks
        self.withdrawn = False  # the ranks of the prompt have ended

    # ------------------------------------------------------------------ for any thread

    def stops(self) -> dict[int, Stop]:
        """Return the ranks that have stopped and wait for an answer."""
        return dict(self._stops)

    def has_stops(self) -> bool:
        """Return whether any rank waits for an answer."""
        return bool(self._stops)

    def has_news(self) -> bool:
        """Return whether there is anything to show or to answer."""
        return bool(self._stops or self._farewells)

    # ------------------------------------------------------------------ for the cell's thread

    def coming(self, within_s: float = float("inf")) -> set[int]:
        """Return the ranks that were answered, or are to stop, and have neither stopped yet nor gone on.

        Args:
            within_s: only those that were answered in these last seconds.
        """
        since = time.monotonic() - within_s
        return {rank for rank, at in list(self._sent.items()) if at > since}

    def answer(self, ranks: Iterable[int], line: str | None, wake: Callable[[], None]) -> None:
        """Answer these ranks; ``wake`` wakes the run's thread."""
        for rank in ranks:
            if self._stops.pop(rank, None) is not None:
                self._sent[rank] = time.monotonic()
                self._answers.put((rank, line))
        wake()

    def look(self, rank: int, wake: Callable[[], None]) -> None:
        """Have this rank stop where it is."""
        self._sent[rank] = time.monotonic()
        self._looks.put(rank)
        wake()

    def farewells(self) -> list[tuple[int, str]]:
        """Return what ranks that have gone on have printed before; once."""
        said, self._farewells = self._farewells, []
        return said

    def ask(self, ranks: Sequence[int], read: Callable[[], str]) -> str | None:
        """Read a line for these ranks. Returns None if they have ended meanwhile.

        Raises:
            KeyboardInterrupt: the cell was interrupted.
        """
        main = threading.current_thread() is threading.main_thread()
        self.withdrawn = False
        with self._lock:
            self._at_prompt = (threading.get_ident(), frozenset(ranks)) if main else None
        try:
            try:
                return read()
            finally:
                with self._lock:
                    self._at_prompt = None
        except KeyboardInterrupt:
            if self.withdrawn:
                return None
            raise

    # ------------------------------------------------------------------ for the run's own thread

    def waits_for_calls(self) -> bool:
        """Return whether a rank is to get a message as soon as it has called its function."""
        return bool(self._undelivered)

    def exchange(self, workers: Sequence[Rank], note: Callable[[int, str], object]) -> None:
        """Take what the ranks' debuggers say, and bring them the answers. ``note`` adds a line to a rank's output."""
        for worker in workers:
            while worker.said:
                self._take(worker, worker.said.popleft(), workers, note)
            if worker.report is not None or not worker.alive:
                if self._stops.pop(worker.rank, None) is not None:
                    worker.answer(None)  # to a thread that the function has left behind
                self._sent.pop(worker.rank, None)
        by_rank = {worker.rank: worker for worker in workers}
        while not self._answers.empty():
            rank, line = self._answers.get()
            if rank in by_rank:
                by_rank[rank].answer(line)
        while not self._looks.empty():
            self._undelivered.setdefault(self._looks.get(), []).append(wire.Look())
        for rank in [rank for rank in self._undelivered if rank in by_rank and by_rank[rank].called]:
            for message in self._undelivered.pop(rank):
                by_rank[rank].tell_debugger(message)
        self._end_prompt_of_the_dead()

    def _take(
        self, worker: Rank, said: wire.Asks | wire.GoesOn, workers: Sequence[Rank], note: Callable[[int, str], object]
    ) -> None:
        self._sent.pop(worker.rank, None)
        if isinstance(said, wire.GoesOn):
            self._farewells.append((worker.rank, said.text))
        elif self._ending:
            worker.answer(None)
        elif said.error and (failure.is_consequence_text(said.error) or any(map(failure.has_failed, workers))):
            worker.answer(None)  # another rank's failure is the error
        elif not self.attended:
            worker.answer(None)
            if not self._told_skipped:
                self._told_skipped = True
                note(worker.rank, _SKIPPED.format("debugger" if said.error else "breakpoint"))
        else:
            if not self._timeouts_held:
                self._timeouts_held = True
                for other in workers:
                    if other is not worker:
                        self._undelivered.setdefault(other.rank, []).append(wire.HoldTimeouts())
            place = Location(worker.rank, "called", (Frame(said.file, said.line, said.function),)).place
            self._stops[worker.rank] = Stop(
                worker.rank, worker.host, said.text, said.prompt, place, said.error, time.monotonic()
            )
        self._nudge()

    def _end_prompt_of_the_dead(self) -> None:
        """End the wait for a line, by an interrupt, if none of the ranks that it is for waits any more."""
        with self._lock:
            if self._at_prompt is not None and not self._at_prompt[1] & self._stops.keys():
                thread, _ = self._at_prompt
                self._at_prompt, self.withdrawn = None, True
                signal.pthread_kill(thread, signal.SIGINT)

    def end_stops(self, workers: Sequence[Rank]) -> None:
        """Have all ranks leave the debugger, and stop no more: they have been interrupted, and are to end."""
        self._ending = True
        for worker in workers:
            if self._stops.pop(worker.rank, None) is not None:
                worker.answer(None)
        self._end_prompt_of_the_dead()

    def close(self) -> None:
        """End it: no rank of this attempt is left."""
        self._stops.clear()
        self._sent.clear()
        self._undelivered.clear()
        while not self._answers.empty():
            self._answers.get()
        self._timeouts_held = self._ending = False
        self._end_prompt_of_the_dead()
