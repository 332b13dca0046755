"""The ranks of one session: starts them, begins and settles their calls, and puts them into a new group."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from nbddp import wire
from nbddp.kernel import failure
from nbddp.kernel.plan import Plan
from nbddp.latch import StayingThread
from nbddp.launch.interface import CrewBase, Gauges, Home, StayingCrew, StayingRank
from nbddp.launch.output import RankOutput, open_output
from nbddp.payload import Packed, Pickled
from nbddp.payload.known import Known
from nbddp.text import ranks_text

_RELEASE_AGAIN_S = 0.1
_REGROUPED_WITHIN_S = 10.0
_POLL_S = 0.02
_ALL_WAIT_S = 0.03  # after a failure, until the other ranks wait for the failed one; see worker/group_sockets.py
_FREE, _INTERRUPT = operator.methodcaller("free"), operator.methodcaller("interrupt")


class Ranks:
    """The ranks of one session, which take one call at a time.

    Attributes:
        home: this machine, or the hosts of the session.
        sent: the notebook's variables that the ranks have.
        lost: ranks that have ended, each with the reason.
        in_call: the name of the call that goes on; "" if there is none.
        thread: calls them, one after the other.
    """

    def __init__(self, plan: Plan, home: Home) -> None:
        self.plan = plan
        self.home = home
        self.sent = Known()
        self.lost: dict[int, str] = {}
        self._findings: list[str] = []
        self.crew: StayingCrew | None = None
        self.in_call = ""
        self.thread = StayingThread("nbddp-session")
        self._group = 0
        self._by_value: list[Any] = []  # functions and classes that the ranks have got, by number
        self._numbers: dict[int, int] = {}
        self._numbers_of_call: tuple[int, ...] = ()

    @property
    def workers(self) -> Sequence[StayingRank]:
        return self.crew.workers if self.crew is not None else []

    def number(self, packed: Packed) -> None:
        """Number the functions and classes of a call for all later answers of the ranks."""
        for obj in packed.by_value:
            if id(obj) not in self._numbers:
                self._numbers[id(obj)] = len(self._by_value)
                self._by_value.append(obj)
        self._numbers_of_call = tuple(self._numbers[id(obj)] for obj in packed.by_value)
        packed.by_value = self._by_value

    # ------------------------------------------------------------------ a call

    def begin(
        self,
        plan: Plan,
        packed: Packed,
        outputs: Sequence[RankOutput],
        block: int,
        start_method: str,
        only: Sequence[int] | None,
    ) -> None:
        """Begin a call on all ranks, and start those that do not exist yet, or no longer.

        Args:
            only: these ranks alone, none of which is lost.

        Raises:
            LaunchError: a process could not be started.
        """
        if self.crew is None:
            self.crew = self.home.staying_crew(start_method, block)
            return self.crew.launch(packed, outputs, 0)
        survivors = [worker for worker in self.workers_of(only) if worker.rank not in self.lost]
        again: list[int] = []
        if self.lost and only is None:
            self._group += 1
            for worker in survivors:
                worker.regroup(self._group)
            again = sorted(self.lost)
            self.lost.clear()
            self.sent = Known()
        call = wire.NextCall(plan.name, packed.nbytes, self._numbers_of_call, plan.attended, plan.post_mortem)
        ranks = [worker.rank for worker in survivors]
        return self.crew.begin_call(call, (packed, block), outputs, ranks, again, self._group)

    def workers_of(self, only: Sequence[int] | None) -> list[StayingRank]:
        """Return these ranks; None: all."""
        return [worker for worker in self.workers if only is None or worker.rank in only]

    def settle(self, released_by: float | None, only: Sequence[int] | None) -> list[str]:
        """End a call: release its ranks, end those that do not come back, and put the others into a new group.

        Args:
            released_by: when the ranks have been asked to leave the call; None: they were not.

        Returns:
            What a failure has left behind, in lines for the user.
        """
        workers = self.workers_of(only)
        self._findings = []
        finished = [worker.report for worker in workers if isinstance(worker.report, wire.Finished)]
        if len(finished) == len(workers):
            if self.plan.backend is not None and not all(report.in_group for report in finished):
                self._regroup()  # the call has destroyed the group, as the last line of many programs does
            return self._findings
        assert self.crew is not None
        within_s = self.crew.returns_within_s
        self._release_all(workers, (time.monotonic() if released_by is None else released_by) + within_s)
        for worker in workers:
            if worker.alive and worker.report is None:
                self.lost[worker.rank] = f"it did not come back from the call within {within_s:.0f} s, and was ended"
                worker.kill()
        if not all(worker.ready for worker in self.workers) or len(self.workers) < self.plan.nprocs:
            self.end()
            return []
        self._find_lost()
        if not self.lost and only is None:
            self._regroup()
        return [*(f"rank {rank} is lost: {why}" for rank, why in self.lost.items()), *self._findings]

    def _release_all(self, workers: Sequence[StayingRank], deadline: float) -> None:
        again_at = 0.0
        while pending := [worker for worker in workers if worker.alive and worker.report is None]:
            now = time.monotonic()
            if now >= deadline:
                return
            if now >= again_at:
                again_at = now + _RELEASE_AGAIN_S
                for worker in pending:
                    worker.free()
                    worker.interrupt()
            self.watch(_POLL_S)

    def watch(self, timeout_s: float) -> None:
        """Wait until something happens, at most ``timeout_s``, and handle it."""
        assert self.crew is not None
        self.crew.watch(timeout_s)

    def find_lost(self) -> None:
        """Notice the ranks that have ended since the last call."""
        if self.crew is not None:
            self.watch(0.0)
            self._find_lost()

    def _find_lost(self) -> None:
        for worker in self.workers:
            if self.lost.get(worker.rank) is None and not worker.alive:
                self.lost[worker.rank] = worker.lost or f"it ended with exit code {worker.exitcode}"
            if worker.rank in self.lost:
                worker.end()

    def _regroup(self) -> None:
        """Put all ranks into a new process group, and compare their models."""
        self._group += 1
        for worker in self.workers:
            worker.regroup(self._group)
        deadline = time.monotonic() + _REGROUPED_WITHIN_S
        while time.monotonic() < deadline and any(w.alive and w.regrouped is None for w in self.workers):
            self.watch(_POLL_S)
        for worker in self.workers:
            answer = worker.regrouped
            if answer is None or answer.error:
                why = answer.error if answer is not None else f"no answer within {_REGROUPED_WITHIN_S:.0f} s"
                self.lost[worker.rank] = f"it could not join the new process group: {why}"
        self._find_lost()
        self._findings = list(self._compare())

    def _compare(self) -> Iterator[str]:
        found = {worker.rank: worker.regrouped for worker in self.workers}
        answers = {rank: answer for rank, answer in found.items() if answer is not None and not answer.error}
        if void := sorted({name for answer in answers.values() for name in answer.void}):
            yield f"{', '.join(void)}: groups of before the failure, which no longer work; make them again"
        for name in dict.fromkeys(name for answer in answers.values() for name in answer.models):
            by_rank = {rank: answer.models.get(name) for rank, answer in answers.items()}
            if len(set(by_rank.values())) > 1:
                other = sorted(rank for rank, found in by_rank.items() if found != by_rank[min(by_rank)])
                where = f"{name} on {ranks_text(other)}"
                yield f"{where} differs from rank {min(by_rank)}'s; .sync({name!r}) makes them equal"

    def open_output(self) -> int:
        """Open a file for the output of one rank in the next call."""
        return self.crew.open_output() if self.crew is not None else open_output()

    # ------------------------------------------------------------------ the end

    def dismiss(self, timeout_s: float) -> None:
        """Let all ranks leave as Python does, and end those that do not within this time."""
        for worker in self.workers:
            worker.dismiss()
        deadline = time.monotonic() + timeout_s
        while any(worker.alive for worker in self.workers) and time.monotonic() < deadline:
            self.watch(_POLL_S)
        self.leave()

    def leave(self) -> None:
        """End all processes, and log out of hosts that the session has logged in to."""
        try:
            self.end()
        finally:
            self.home.close()
            self.thread.end()

    def end(self) -> None:
        """End all processes at once, and everything that belongs to them."""
        crew, self.crew = self.crew, None
        if crew is not None:
            try:
                crew.__exit__()
            finally:
                crew.close()
        self.sent, self.lost, self._group = Known(), {}, 0

    def disown(self) -> None:
        """In a process forked from the notebook kernel: hold nothing of the ranks open."""
        if self.crew is not None:
            self.crew.disown()


class SessionSite:
    """Where one call of a session finds its data and its ranks; see ``launch.interface.Site``."""

    def __init__(self, plan: Plan, ranks: Ranks, only: Sequence[int] | None, owner: object) -> None:
        """
        Args:
            only: the ranks that take the call; None: all.
            owner: lives as long as the call.
        """
        self._data = ranks.home.for_call()
        self.layout = ranks.home.layout
        self.thread: StayingThread | None = ranks.thread
        self._plan = plan
        self._ranks = ranks
        self._only = only
        self._owner = owner
        ranks.in_call = plan.name

    @property
    def gauges(self) -> Gauges:
        return self._data.gauges

    def copy_data(self, pickled: Pickled, keep_going: Callable[[], bool]) -> None:
        """Copy the data into a block for the ranks."""
        self._ranks.number(pickled.packed)
        self._data.copy_data(pickled, keep_going)

    def open_output(self) -> int:
        """Open a file for the output of one rank."""
        return self._ranks.open_output()

    def new_crew(self, start_method: str) -> CallCrew:
        """Return the session's ranks, for this call."""
        return CallCrew(self._ranks, self._plan, self._data.block, start_method, self._only)

    def remember_snapshots(self, saved: Mapping[str, int]) -> None:
        """Do nothing: a session starts no rank again by itself."""

    def missing(self) -> str:
        """Return "": a lost host ends the call."""
        return ""

    def waits_for(self, *, started: bool) -> str:
        """Return what the first call or the data wait for, in words; "" for nothing."""
        return self._data.waits_for(started=started)

    def close(self) -> None:
        """Free the call's data; the session can take the next call."""
        self._data.close()
        self._ranks.in_call = ""

    def slow_links(self) -> str:
        """Return "": nothing goes over a network."""
        return ""

    def can_restart(self) -> bool:
        """Return False: the session goes on with the ranks as they are."""
        return False


class CallCrew(CrewBase):
    """The ranks of a session during one call; see ``launch.interface.Crew``."""

    def __init__(self, ranks: Ranks, plan: Plan, block: int, start_method: str, only: Sequence[int] | None) -> None:
        self._ranks = ranks
        self._only = only
        self._plan = plan
        self._block = block
        self._start_method = start_method
        self._asked = False  # the ranks have been asked to leave the call
        self._steps: list[tuple[float, Callable[[StayingRank], None]]] = []  # to take at these times
        self._released_by: float | None = None
        self._begun = False
        self._outputs: Sequence[RankOutput] = ()

    @property
    def workers(self) -> Sequence[StayingRank]:  # type: ignore[override]
        return self._ranks.workers_of(self._only)

    @property
    def alive(self) -> bool:
        """Whether any rank is still in the call."""
        return any(worker.alive and worker.report is None for worker in self.workers)

    def __enter__(self) -> CallCrew:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._begun:
            lines = self._ranks.settle(self._released_by, self._only)
            if self._ranks.crew is not None:
                self._ranks.crew.end_call()
            for line in lines:
                self._outputs[0].note(line)

    def launch(self, packed: Packed, outputs: Sequence[RankOutput], restart_count: int) -> None:
        """Begin the call on all ranks."""
        self._outputs = outputs
        try:
            self._ranks.begin(self._plan, packed, outputs, self._block, self._start_method, self._only)
        except BaseException:
            self._ranks.end()  # some ranks wait for those that could not be started
            raise
        self._begun = True
        self._ranks.sent.add(packed.variables)

    def watch(self, timeout_s: float) -> None:
        """Wait until something happens, at most ``timeout_s``; when a rank has failed, have the others leave."""
        left = [due - time.monotonic() for due, _ in self._steps]
        self._ranks.watch(max(0.0, min([timeout_s, *left])))
        if not self._asked and self._has_failed_by_itself():
            # First those that wait for the failed rank; an interrupt could hit the end of a ``with`` in torch's code.
            self._have_them_leave([(_ALL_WAIT_S, _FREE), (2 * _ALL_WAIT_S, _INTERRUPT)])
        self._take_due_steps()

    def _has_failed_by_itself(self) -> bool:
        failed = [worker for worker in self.workers if failure.has_failed(worker)]
        return not all(map(failure.is_consequence, failed))

    def interrupt(self) -> None:
        """Raise KeyboardInterrupt in every rank that is in the call, also where it waits for other ranks."""
        if not self._asked:
            # Again and again: torch may spend 5 s on a DataLoader's worker while it handles the first interrupt.
            later = [(seconds, _INTERRUPT) for seconds in (1.0, 2.0, 3.0)]
            self._have_them_leave([(0.0, _INTERRUPT), (_ALL_WAIT_S, _FREE), *later])
            self._take_due_steps()

    def _have_them_leave(self, steps: Sequence[tuple[float, Callable[[StayingRank], None]]]) -> None:
        now = time.monotonic()
        self._asked = True
        if self._ranks.crew is not None:
            self._ranks.crew.cancel_upload()
        self._steps = [(now + delay, step) for delay, step in steps]
        self._released_by = now + 2 * _ALL_WAIT_S

    def _take_due_steps(self) -> None:
        while self._steps and self._steps[0][0] <= time.monotonic():
            _, step = self._steps.pop(0)
            for worker in self.workers:
                if worker.alive and worker.report is None:
                    step(worker)

    def wake(self) -> None:
        """End a :meth:`watch` under way in another thread."""
        if self._ranks.crew is not None:
            self._ranks.crew.wake()

    def dismiss_reported(self) -> None:
        """Do nothing: the ranks stay."""

    def stacks(self, timeout_s: float) -> dict[int, str]:
        """Return faulthandler's dumps by rank, of the ranks that answer in time."""
        return self._ranks.crew.stacks(timeout_s) if self._ranks.crew is not None else {}

    def close(self) -> None:
        """Close the ends of this call."""
        for worker in self.workers:
            worker.close_call()

    def disown(self) -> None:
        """In a process forked from the notebook kernel: hold nothing of the ranks open."""
        self._ranks.disown()
