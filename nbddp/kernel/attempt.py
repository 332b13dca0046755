"""Follows all ranks of one attempt at a run, from their start to their end."""

from __future__ import annotations

import contextlib
import functools
import itertools
import time
from collections.abc import Callable
from typing import Any, TypeVar

from nbddp import wire
from nbddp.errors import NanLogged, PayloadError, RunTimeout
from nbddp.history.history import History
from nbddp.kernel import failure, stacks
from nbddp.kernel.hang import Locator, StallDetector
from nbddp.kernel.plan import Plan
from nbddp.kernel.remarks import side_by_side
from nbddp.kernel.state import RunState
from nbddp.latch import Abandoned, aside
from nbddp.launch.interface import Crew, Rank
from nbddp.payload import Packed, Unpacked
from nbddp.payload.partial import Remains
from nbddp.tracebacks import drop_our_frames

_LEAVE_GRACE_S = 30.0  # for exit handlers, threads that still save and NCCL's teardown, once every rank has reported
_POLL_S = 0.2  # between two reads of metrics and output; 0.1 took half as much again of a core
_CALL_POLL_S = 0.02  # while a rank is to get a message at the beginning of its call, which nothing reports
_PEERS_GRACE_S = 0.2  # for the other ranks' finally blocks when one has failed
_FAILURE_WINDOW_S = 0.1  # how much later than its consequence a failure may be reported
_CONSEQUENCE_WINDOW_S = 1.0
_CONSEQUENCE_WINDOW_ON_HOSTS_S = 5.0  # a host that ends takes longer to be noticed than its broken connections
_STACKS_TIMEOUT_S = 0.1  # short, since the user waits for the run to end
_BACKLOG_BYTES = 128 << 10  # of metrics in one read: the rank logs faster than the notebook reads
_SEE_PARTIAL = ". All else that the ranks returned is in this error's .partial, by rank"
_WITH_RESULT = (wire.Finished, wire.Failed)
_T = TypeVar("_T")


class HostsAreBack(Exception):
    """A snapshot was saved after hosts have come back: the ranks are to start again from it, on them as well."""


class Attempt:
    """All ranks of one attempt, from their start to their end. Runs on the run's own thread.

    Attributes:
        locator: finds out where the ranks are, for any thread while ``state.crew`` is this attempt's crew.
    """

    def __init__(
        self, plan: Plan, packed: Packed, crew: Crew, state: RunState, history: History, stall: StallDetector
    ) -> None:
        self._plan = plan
        self._packed = packed
        self._crew = crew
        self._state = state
        self._stall = stall
        self._history = history
        self._deadline = state.began + (plan.timeout_s or float("inf"))
        self._snapshots = history.snapshots  # before a host came back
        self._failures = failure.Failures(plan.name, plan.nprocs, packed.by_value, plan.device, plan.ranks)
        self.locator = Locator(crew, self._failures, history, state, stall)

    def run(self) -> None:
        """Start all ranks and follow them to their end. Raises the error of the first failure."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._state.attached(self._crew))
            stack.callback(self._feed_all)  # what the ranks wrote before they ended
            stack.callback(self._state.dialog.close)
            stack.enter_context(self._crew)
            self._crew.launch(self._packed, self._state.outputs, self._state.restarts)
            self._failures.ranks = len(self._crew.workers)
            self._history.resize(len(self._crew.workers))
            try:
                self._follow()
            except Abandoned:
                if self._state.stop_grace_s is None:
                    raise RunTimeout(
                        f"{self._plan.name} was stopped after its timeout of {self._plan.timeout_s} s: its ranks had "
                        "ended, and the notebook was unpickling their results"
                    ) from None
                self._state.conclude("stopped")

    def _follow(self) -> None:
        more = False
        while True:
            self._watch(0.0 if more else max(0.0, min(_POLL_S, self._deadline - time.monotonic())))
            more = self._feed()
            if self._state.phase == "starting" and self._crew.ready:
                self._state.phase = "running"
            if self._state.stop_grace_s is not None:
                return self._stop()
            if any(map(failure.has_failed, self._crew.workers)):
                return self._fail()
            self._check_for_nan()
            self._check_for_hosts()
            if all(isinstance(worker.report, wire.Finished) for worker in self._crew.workers):
                return self._succeed()
            if time.monotonic() >= self._deadline:
                self._time_out()
            self.locator.check_for_a_stall(self._feed)

    # ------------------------------------------------------------------ how it ends

    def _succeed(self) -> None:
        results, losses, values = self._unpack_aside(self._unpack_results)
        notes = [result.notes for result in results]
        for note in dict.fromkeys(itertools.chain(*notes)):
            ranks = [str(rank) for rank, rank_notes in enumerate(notes) if note in rank_notes]
            self._state.outputs[0].note(f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}: {note}")
        reports = [worker.report for worker in self._crew.workers if isinstance(worker.report, wire.Finished)]
        self._state.remark = side_by_side(self._plan, reports, sharing=bool(self._packed.inherited))
        self._state.held = reports[0].held
        self._crew.dismiss_reported()
        # Exit handlers and threads are left: a stop or the timeout need not wait for them.
        leave_by = min(time.monotonic() + _LEAVE_GRACE_S, self._deadline)
        self._watch_until(leave_by, or_when=lambda: self._state.stop_grace_s is not None)
        self._feed_all()  # a rank writes its last metrics after its report
        self._check_for_nan()
        if losses:
            losses[0].partial = values
            raise losses[0]
        self._state.values, self._state.hang = values, ""
        self._state.conclude("finished")

    def _unpack_results(self) -> tuple[list[Unpacked], list[PayloadError], list[Any]]:
        """Return the ranks' results, the errors of results that are incomplete, and the run's values."""
        results, losses = zip(*(self._result_of(worker) for worker in self._crew.workers))
        return list(results), list(filter(None, losses)), self._plan.receive([result.value for result in results])

    def _result_of(self, worker: Rank) -> tuple[Unpacked, PayloadError | None]:
        report = worker.report
        assert isinstance(report, wire.Finished)
        try:
            unpacked = Unpacked(None, [], {}, [])
            if report.nbytes:
                unpacked = worker.unpack_result(report.nbytes, self._packed.by_value)
        except Exception as error:  # whatever unpickling a user's object raises
            drop_our_frames(error)
            why = f"{type(error).__name__}: {error}"
            what = f"what {self._plan.name} returned on rank {worker.rank}"
            lost = PayloadError(f"{what} cannot be unpacked in the notebook: {why}{_SEE_PARTIAL}")
            lost.__cause__ = error
            return Unpacked(Remains(f"<{what}>", why), [], {}, []), lost
        return unpacked, PayloadError(f"{report.lost}{_SEE_PARTIAL}", report.lost_path) if report.lost else None

    def _fail(self) -> None:
        """Raise the first failure; the other ranks are stopped at once."""

        def all_have_ended() -> bool:
            return all(worker.report is not None or not worker.alive for worker in self._crew.workers)

        def a_cause_is_known() -> bool:
            failed = list(filter(failure.has_failed, self._crew.workers))
            return not all(map(failure.is_consequence, failed)) or len(failed) == len(self._crew.workers)

        began = time.monotonic()
        self._watch_until(began + _FAILURE_WINDOW_S, or_when=all_have_ended)
        # With nothing but broken connections, the report of the rank that broke them has not arrived yet.
        window_s = _CONSEQUENCE_WINDOW_ON_HOSTS_S if self._plan.shares else _CONSEQUENCE_WINDOW_S
        self._watch_until(began + window_s, or_when=a_cause_is_known)
        first = failure.first_of(self._crew.workers)
        where, alike = self._locate_after_timeout(first), failure.all_alike(self._crew.workers)
        # Not a lambda: the traceback of the error keeps its callers, and so would keep this attempt.
        error = self._unpack_aside(functools.partial(self._failures.error_of, first, where, alike=alike))
        self._wind_down(lambda: _PEERS_GRACE_S)
        raise error

    def _locate_after_timeout(self, first: Rank) -> str:
        """Return where all ranks are, in one line, if a collective timed out; else ""."""
        if not failure.is_timeout(first):
            return ""
        locations = self.locator.locate(_STACKS_TIMEOUT_S, self._feed)
        in_collective = first.report is None or locations[first.rank].waiting_in
        return stacks.summary(locations, stalled=True) if in_collective else ""

    def _stop(self) -> None:
        # If the lock is not free, another thread is already asking for the stacks.
        lock, may_ask = self._state.stacks_lock, self._state.stop_grace_s and self._crew.workers
        if may_ask and lock.acquire(timeout=_STACKS_TIMEOUT_S):
            try:
                self._state.stop_summary = stacks.summary(self.locator.locate(_STACKS_TIMEOUT_S, self._feed))
            finally:
                lock.release()
        self._wind_down(lambda: self._state.stop_grace_s or 0.0)
        self._state.conclude("stopped")

    def _check_for_nan(self) -> None:
        """End the run at the first NaN, if it has ``stop_on_nan=True``."""
        nan = self._history.first_nan() if self._plan.stop_on_nan else None
        if nan is not None:
            self._wind_down(lambda: _PEERS_GRACE_S)
            raise NanLogged(nan.name, nan.step, nan.ranks)

    def _check_for_hosts(self) -> None:
        """With ``grow=True``, end the attempt at the first snapshot after a host has come back."""
        if not self._plan.grow or any(worker.report is not None for worker in self._crew.workers):
            return
        back = self._crew.hosts_back()
        if not back:
            self._snapshots = self._history.snapshots
        elif self._history.snapshots > self._snapshots:
            self._wind_down(lambda: _PEERS_GRACE_S)
            raise HostsAreBack(", ".join(back))

    def _time_out(self) -> None:
        where = self.locator.report(self._feed) if self._crew.workers else "no rank had been started"
        self._wind_down(lambda: _PEERS_GRACE_S)
        raise RunTimeout(
            f"{self._plan.name} was still {self._state.phase} after its timeout of {self._plan.timeout_s} s and was "
            f"stopped. It was here: {where}"
        )

    # ------------------------------------------------------------------ on the way there

    def _wind_down(self, grace_s: Callable[[], float]) -> None:
        """Raise KeyboardInterrupt in the ranks and give their ``finally`` time; the crew's end kills the rest."""
        began = time.monotonic()
        self._crew.interrupt()
        self._state.dialog.end_stops(self._crew.workers)
        while self._crew.alive and (left := began + grace_s() - time.monotonic()) > 0:
            self._crew.dismiss_reported()
            self._watch(min(_POLL_S, left))
            self._feed()

    def _watch(self, timeout_s: float) -> None:
        """Wait until something happens, and handle it. While a rank is in the debugger, no time limit counts."""
        began, dialog = time.monotonic(), self._state.dialog
        was_stopped = dialog.has_stops()
        self._crew.watch(min(timeout_s, _CALL_POLL_S) if dialog.waits_for_calls() else timeout_s)
        dialog.exchange(self._crew.workers, self._note)
        if was_stopped:
            self._deadline += time.monotonic() - began
            self._stall.restart()

    def _note(self, rank: int, line: str) -> None:
        self._state.outputs[rank].note(line)

    def _watch_until(self, deadline: float, or_when: Callable[[], bool]) -> None:
        while self._crew.alive and (left := deadline - time.monotonic()) > 0 and not or_when():
            self._watch(min(_POLL_S, left))
            self._feed()

    def _unpack_aside(self, unpack: Callable[[], _T]) -> _T:
        """Unpickle on another thread, since the user's code may never return; here, if there is nothing to unpickle.

        Raises:
            Abandoned: a stop or the timeout ended the wait.
        """
        if not any(worker.report.nbytes for worker in self._crew.workers if isinstance(worker.report, _WITH_RESULT)):
            return unpack()
        stop_seen_at: list[float] = []

        def give_up() -> bool:
            grace_s, now = self._state.stop_grace_s, time.monotonic()
            if grace_s is None:
                return now >= self._deadline
            stop_seen_at.append(now)
            return now >= stop_seen_at[0] + grace_s

        return aside(unpack, "nbddp-unpack", give_up)

    def _feed(self) -> bool:
        """Add a part of the logged metrics to the history. Returns whether there may be more."""
        return max(map(self._feed_from, self._crew.workers), default=0) >= _BACKLOG_BYTES

    def _feed_all(self) -> None:
        for worker in self._crew.workers:
            while self._feed_from(worker):
                pass

    def _feed_from(self, worker: Rank) -> int:
        data = worker.read_metrics()
        if data:
            self._history.feed(worker.rank, data, time.time())
        return len(data)
