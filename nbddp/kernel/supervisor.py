"""Kernel side. One run from its first process to its last, on a thread of its own.

A thread, so that no interrupt of the notebook can land in the middle of starting or ending processes:
Python raises KeyboardInterrupt in the main thread alone, and there it becomes a request to stop.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from torch.distributed import DistError

from nbddp import wire
from nbddp.errors import HostLost, LaunchError, NbddpError, PayloadError, RankDied, RankError, RunTimeout, in_a_line
from nbddp.kernel import failure, forkserver, stacks
from nbddp.kernel.crew import AnyCrew, AnyWorker, Site
from nbddp.kernel.history import History
from nbddp.kernel.output import RankOutput, open_output
from nbddp.kernel.plan import Plan
from nbddp.kernel.remarks import side_by_side
from nbddp.kernel.stacks import Where
from nbddp.payload import Pickled, Unpacked
from nbddp.remains import Remains
from nbddp.tracebacks import drop_our_frames
from nbddp.waiting import Abandoned, Latch, aside, start_thread

_LEAVE_GRACE_S = 30.0  # for exit handlers, threads that still save and NCCL's teardown, once every rank has reported
_TICK_S = 0.2  # between two looks for metrics and output; with 0.1 the kernel took half as much again of a core
_PEERS_GRACE_S = 0.2  # for the other ranks' finally blocks when one has failed
_FAILURE_WINDOW_S = 0.1  # how much later than its consequence a failure may be heard of
_ECHO_WINDOW_S = 1.0
_STACKS_S = 1.0  # for the ranks' answers
_STILL_S = 2.0  # without a sign of life
_LOOK_AGAIN_S = 0.2
_SOON_S = 0.1  # the same, while somebody waits for the run's end
_T = TypeVar("_T")
_REST = ". All else that the ranks returned is in this error's .partial, by rank"
_MUCH_BYTES = 128 << 10  # of metrics at once: the rank logs faster than we look


class Supervisor:
    """Starts the ranks of one run, follows them, ends them. All public members may be used from any thread.

    Attributes:
        state: ``starting running finished failed stopped``.
        error: what a failed run raises.
        values: by rank, of a finished run.
        taken: set when the data have been copied: whoever has them may change them from here on.
        done: set when every process is gone and every fd is closed (of much data, just after).
        restarts, restart_reason: how often all ranks have started again, and the last time after what.
        hang: where the ranks are when nothing has moved for ``stall_after`` seconds; else "".
        remark: what a finished run has to say that is no error; else "".
    """

    def __init__(self, plan: Plan, pickled: Pickled, history: History, site: Site) -> None:
        self.state = "starting"
        self.error: BaseException | None = None
        self.values: list[Any] | None = None
        self.taken = Latch()
        self.done = Latch()
        self.outputs: list[RankOutput] = []
        self.began = time.monotonic()
        self.ended: float | None = None
        self.restarts = 0
        self.restart_reason = ""
        self.hang = ""
        self.remark = ""
        self._plan = plan
        self._site = site
        self._deadline = self.began + (plan.timeout_s or float("inf"))
        self._pickled: Pickled | None = pickled
        self._packed = pickled.packed
        self._history = history
        self._lock = threading.Lock()  # over what another thread may ask of the crew while its fds are open
        self._asking = threading.RLock()  # the same, for what takes a while: a request to stop does not wait for it
        self._crew: AnyCrew | None = None
        self._rank_states: list[str] = []
        self._pids: list[int] = []
        self._stop_grace_s: float | None = None
        self._over = False
        self._callbacks: list[Callable[[], None]] = []
        self._start_method = plan.start_method
        self._renewed = False  # the fork server, for this run
        self._attempt_began = self.began
        self._naming = failure.Naming(plan.name, plan.nprocs, self._packed.by_value, plan.device)
        self._stillness = _Stillness(plan.stall_after_s)
        self._first: NbddpError | None = None  # of a run that has been restarted
        self._was_here = ""  # where the ranks were when the run was stopped
        self._thread: threading.Thread | None = None
        self._tickets = [self]  # for the one thread that may live this run

    # ------------------------------------------------------------------ from other threads

    @property
    def seconds(self) -> float:
        """Since the start; of a run that is over, how long it took."""
        return (self.ended or time.monotonic()) - self.began

    def start(self) -> None:
        """Begin; a second time without effect. After an interrupt nobody knows whether the first time counted."""
        start_thread(self._live, f"nbddp-{self._plan.name}", self._cannot_start)

    def _cannot_start(self, error: RuntimeError) -> None:
        if self._tickets:
            self._tickets.clear()
            self._conclude("failed", LaunchError(f"{self._plan.name} could not be started: {error}"))
            self._end()

    def request_stop(self, grace_s: float) -> None:
        """Begin to end the run; a second request can only shorten the grace."""
        with self._lock:
            self._stop_grace_s = grace_s if self._stop_grace_s is None else min(grace_s, self._stop_grace_s)
            if self._crew is not None:
                self._crew.wake()

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait until the run is over and its thread has ended. Returns whether it is."""
        if not self.done.wait(timeout_s):
            return False
        if self._thread is not None and threading.current_thread() is not self._thread:
            self._thread.join()
        return True

    def when_done(self, callback: Callable[[], None]) -> None:
        """Call back when the run is over, on the run's thread; at once if it is."""
        with self._lock:
            if not self._over:
                self._callbacks.append(callback)
                return
        callback()

    def stacks(self) -> str:
        """Where each rank is, as text."""
        with self._asking:
            crew = self._crew
            if crew is not None and crew.workers:
                return stacks.report(*self._settled(crew))
        text = f"{self._plan.name} is {self.state}: no rank is running"
        return f"{text}; when it was stopped: {self._was_here}" if self._was_here else text

    def was_here(self) -> str:
        """Where the ranks of a stopped run were when it was stopped, in one line; "" if nobody looked."""
        return self._was_here

    def pids(self) -> list[int]:
        """Of the ranks that have been started, by rank; also after their end."""
        with self._lock:
            if self._crew is not None:
                self._pids = [worker.pid for worker in self._crew.workers]
            return self._pids

    def rank_states(self) -> list[str]:
        """``starting``, ``running``, ``finished`` or ``ended`` of the ranks that have been started, by rank."""
        with self._lock:
            if self._crew is not None:
                self._rank_states = [_state_of(worker) for worker in self._crew.workers]
            return self._rank_states

    def disown(self) -> None:
        """In a process forked from the kernel: this run is not its own."""
        if self._crew is not None:
            self._crew.disown()

    # ------------------------------------------------------------------ the run's own thread

    def _live(self) -> None:
        try:
            self._tickets.pop()
        except IndexError:
            return
        self._thread = threading.current_thread()
        try:
            self._attempts()
        except NbddpError as error:
            if self._first is not None and error is not self._first:
                error.after_restarts(self.restarts, self._first)
            self._conclude("failed", error)
        except (OSError, DistError) as error:
            self._conclude("failed", self._refused(error))
        except BaseException as error:  # the end of this thread: what it does not report is lost
            self._conclude("failed", NbddpError(f"nbddp itself failed: {type(error).__name__}: {error}"))
            assert self.error is not None
            self.error.__cause__ = error
        finally:
            self._end()

    def _end(self) -> None:
        try:
            self._site.close()
        finally:
            self._tell_of_the_end()

    def _tell_of_the_end(self) -> None:
        self._pickled = None  # of a run that ended before it had copied the notebook's arrays
        self._packed.inherited.clear()
        self._history.settle(broken_off=self.state != "finished")
        self.ended = time.monotonic()
        with self._lock:
            self._over = True
            callbacks, self._callbacks = self._callbacks, []
        self.taken.open()
        self.done.open()
        for callback in callbacks:
            callback()

    def _refused(self, error: Exception) -> NbddpError:
        """The system has no more to give."""
        traceback.clear_frames(error.__traceback__)  # the notebook's arrays are in them
        advice = "; most often this is the limit of open files (ulimit -n)" if isinstance(error, DistError) else ""
        kind = LaunchError if self.state == "starting" else NbddpError
        refused = kind(f"the system refused what {self._plan.name} needs: {error}{advice}")
        refused.__cause__ = error
        return refused

    def _conclude(self, state: str, error: BaseException | None = None) -> None:
        self.error = error
        self.state = state

    def _attempts(self) -> None:
        with contextlib.ExitStack() as stack:
            for _ in range(self._plan.nprocs):
                self.outputs.append(RankOutput(open_output()))
                stack.callback(self.outputs[-1].close)
            self._take_data()
            while self.state == "starting":
                self._attempt_if_wanted()

    def _take_data(self) -> None:
        pickled, self._pickled = self._pickled, None
        assert pickled is not None
        self._site.take(pickled, lambda: self._stop_grace_s is None)
        self.taken.open()

    def _attempt_if_wanted(self) -> None:
        """One attempt; afterwards the state is ``starting`` if there is to be another."""
        if self._stop_grace_s is not None:
            return self._conclude("stopped")
        try:
            return self._attempt()
        except failure.BadFork as error:
            self._start_otherwise(error)
        except (RankError, RankDied, HostLost, LaunchError) as error:  # the others would fail again
            if self._stop_grace_s is not None or self.restarts == self._plan.max_restarts:
                raise
            if not self._site.may_go_on():
                raise
            self._first = self._first or error
            self._prepare_restart(in_a_line(error).partition("; most often")[0])
        return None

    def _start_otherwise(self, error: failure.BadFork) -> None:
        self._start_method = self._method_after(error)
        if error.outdated:
            self.outputs[0].note(_outdated_text(error.outdated, self._start_method))
            return
        why = error.preloaded or "the fork server initialised CUDA"
        for output in self.outputs:
            output.note(f"started again by {self._start_method}: {why}")

    def _method_after(self, error: failure.BadFork) -> str:
        if self._plan.shares:  # a host's fork server
            return "spawn"
        if not error.outdated:
            return forkserver.method_without(preloaded=error.preloaded)
        if self._renewed:
            return "spawn"
        self._renewed = True
        return forkserver.method_with(error.outdated, self._plan.environ, since=self._attempt_began)

    def _prepare_restart(self, reason: str) -> None:
        self.restart_reason = reason
        self.restarts += 1
        self.state, self.hang = "starting", ""
        self._pids, self._rank_states = [], []  # the dead ranks' pids may be strangers' soon
        self._history.restart(reason)
        for output in self.outputs:
            output.note(f"restarted {self.restarts} of {self._plan.max_restarts} after {reason}")

    def _attempt(self) -> None:
        """Start all ranks and follow them to their end. Raises what the first failure is."""
        with contextlib.ExitStack() as stack:
            self._attempt_began = time.monotonic()
            crew = self._site.new_crew(self._start_method)
            stack.callback(self._let_go)
            stack.callback(self._feed_all, crew)  # what the ranks wrote before they ended
            stack.enter_context(crew)
            with self._lock:
                self._crew = crew
            crew.launch(self._packed, self.outputs, self.restarts)
            self._naming = dataclasses.replace(self._naming, ranks=len(crew.workers))
            self._history.resize(len(crew.workers))
            try:
                self._follow(crew)
            except Abandoned:
                if self._stop_grace_s is None:
                    raise RunTimeout(
                        f"{self._plan.name} was stopped after its timeout of {self._plan.timeout_s} s: its ranks had "
                        "ended, and the notebook was unpickling what they had left"
                    ) from None
                self._conclude("stopped")

    def _aside(self, unpack: Callable[[], _T]) -> _T:
        """Unpickling runs code of the user's, which may never end; a request to stop, or the run's timeout, does.

        Raises:
            Abandoned: by one of these.
        """
        asked: list[float] = []  # when it was first seen

        def give_up() -> bool:
            grace_s, now = self._stop_grace_s, time.monotonic()
            if grace_s is None:
                return now >= self._deadline
            asked.append(now)
            return now >= asked[0] + grace_s

        return aside(unpack, "nbddp-unpack", give_up)

    def _let_go(self) -> None:
        self.rank_states(), self.pids()  # the last ones, for who asks later
        with self._asking, self._lock:
            assert self._crew is not None
            self._crew.close()
            self._crew = None

    def _follow(self, crew: AnyCrew) -> None:
        more = False
        while True:
            crew.watch(0.0 if more else max(0.0, min(_TICK_S, self._deadline - time.monotonic())))
            more = self._feed(crew)
            if self.state == "starting" and crew.ready:
                self.state = "running"
            if self._stop_grace_s is not None:
                return self._stop(crew)
            if any(map(failure.has_failed, crew.workers)):
                return self._fail(crew)
            if all(isinstance(worker.report, wire.Finished) for worker in crew.workers):
                return self._succeed(crew)
            if time.monotonic() >= self._deadline:
                self._time_out(crew)
            self._look_for_a_hang(crew)

    def _look_for_a_hang(self, crew: AnyCrew) -> None:
        """Nothing has been logged, printed or said for long: tell where the ranks are."""
        if self._stillness.has_lasted(crew.signs_of_life()):
            where = stacks.report(*self._settled(crew))
            self.hang = f"Nothing has been logged or printed for {self._stillness.seconds:.0f} s: {where}"
        elif not self._stillness.told:
            self.hang = ""

    def _settled(self, crew: AnyCrew) -> tuple[list[Where], bool]:
        """Where the ranks are, and whether they stand still there: only then can somebody be at fault."""
        found = self._where(crew, _STACKS_S)
        if self._stillness.seconds < _STILL_S:
            return found, False
        time.sleep(_LOOK_AGAIN_S)
        return found, found == self._where(crew, _STACKS_S)

    def _where(self, crew: AnyCrew, timeout_s: float) -> list[Where]:
        with self._asking:
            dumps = crew.stacks(timeout_s)
        if threading.current_thread() is self._thread:  # another may be interrupted between reading and feeding
            self._feed(crew)
        steps = [rank.step for rank in self._history.ranks]
        return [self._naming.where_of(w, dumps.get(w.rank, ""), steps[w.rank]) for w in crew.workers]

    def _feed(self, crew: AnyCrew) -> bool:
        """Take in what the ranks have logged, a part of it. Returns whether there may be more."""
        return max(map(self._feed_from, crew.workers), default=0) >= _MUCH_BYTES

    def _feed_all(self, crew: AnyCrew) -> None:
        for worker in crew.workers:
            while self._feed_from(worker):
                pass

    def _feed_from(self, worker: AnyWorker) -> int:
        data = worker.read_metrics()
        if data:
            self._history.feed(worker.rank, data)
        return len(data)

    def _succeed(self, crew: AnyCrew) -> None:
        results, losses, values = self._aside(lambda: self._received(crew))
        for line in _by_ranks([result.notes for result in results]):
            self.outputs[0].note(line)
        reports = [worker.report for worker in crew.workers if isinstance(worker.report, wire.Finished)]
        self.remark = side_by_side(self._plan, reports, sharing=bool(self._packed.inherited))
        crew.dismiss_reported()
        # What is left are exit handlers and threads: a stop or the end of the time need not wait for them.
        leave_by = min(time.monotonic() + _LEAVE_GRACE_S, self._deadline)
        self._watch_until(crew, leave_by, or_when=lambda _: self._stop_grace_s is not None)
        if losses:
            losses[0].partial = values
            raise losses[0]
        self.values, self.hang = values, ""
        self._conclude("finished")

    def _received(self, crew: AnyCrew) -> tuple[list[Unpacked], list[PayloadError], list[Any]]:
        """What the ranks returned, with what there is to say about it; what of it is lost; the run's values of it."""
        results, losses = zip(*(self._result_of(worker) for worker in crew.workers))
        return list(results), list(filter(None, losses)), self._plan.receive([result.value for result in results])

    def _result_of(self, worker: AnyWorker) -> tuple[Unpacked, PayloadError | None]:
        report = worker.report
        assert isinstance(report, wire.Finished)
        try:
            unpacked = worker.unpack_result(report.nbytes, self._packed.by_value)
        except Exception as error:  # whatever unpickling a user's object raises
            drop_our_frames(error)
            why = f"{type(error).__name__}: {error}"
            what = f"what {self._plan.name} returned on rank {worker.rank}"
            lost = PayloadError(f"{what} cannot be unpacked in the notebook: {why}{_REST}")
            lost.__cause__ = error
            return Unpacked(Remains(f"<{what}>", why), [], {}, []), lost
        return unpacked, PayloadError(f"{report.lost}{_REST}", report.lost_path) if report.lost else None

    def _fail(self, crew: AnyCrew) -> None:
        """Raise the failure that came first; the other ranks are stopped at once."""
        began = time.monotonic()
        self._watch_until(crew, began + _FAILURE_WINDOW_S, or_when=_all_have_ended)
        # Broken connections alone: the rank that broke them is still on its way to saying why.
        self._watch_until(crew, began + _ECHO_WINDOW_S, or_when=lambda crew: not _only_echoes(crew))
        first = failure.first_of(crew.workers)
        where, alike = self._who_was_missing(crew, first), failure.all_alike(crew.workers)
        error = self._aside(lambda: self._naming.error_of(first, where, alike=alike))
        self._wind_down(crew, lambda: _PEERS_GRACE_S)
        raise error

    def _who_was_missing(self, crew: AnyCrew, first: AnyWorker) -> str:
        """Of a collective that timed out: where all ranks were, in a line."""
        if not failure.is_timeout(first):
            return ""
        wheres = self._where(crew, _SOON_S)
        meeting = first.report is None or wheres[first.rank].meeting
        return stacks.summary(wheres, still=True) if meeting else ""

    def _stop(self, crew: AnyCrew) -> None:
        if self._stop_grace_s and crew.workers and self._asking.acquire(timeout=_SOON_S):  # else somebody asks already
            try:
                self._was_here = stacks.summary(self._where(crew, _SOON_S))
            finally:
                self._asking.release()
        self._wind_down(crew, lambda: self._stop_grace_s or 0.0)
        self._conclude("stopped")

    def _time_out(self, crew: AnyCrew) -> None:
        where = stacks.report(*self._settled(crew)) if crew.workers else "no rank had been started"
        self._wind_down(crew, lambda: _PEERS_GRACE_S)
        raise RunTimeout(
            f"{self._plan.name} was still {self.state} after its timeout of {self._plan.timeout_s} s and was "
            f"stopped. It was here: {where}"
        )

    def _wind_down(self, crew: AnyCrew, grace_s: Callable[[], float]) -> None:
        """KeyboardInterrupt in the ranks, and time for their ``finally``; the crew's end kills the rest."""
        began = time.monotonic()
        crew.interrupt()
        while crew.alive and (left := began + grace_s() - time.monotonic()) > 0:
            crew.dismiss_reported()
            crew.watch(min(_TICK_S, left))
            self._feed(crew)

    def _watch_until(self, crew: AnyCrew, deadline: float, or_when: Callable[[AnyCrew], bool] | None = None) -> None:
        while crew.alive and (left := deadline - time.monotonic()) > 0 and not (or_when and or_when(crew)):
            crew.watch(min(_TICK_S, left))
            self._feed(crew)


class _Stillness:
    """Notices that nothing moves, and again when that has lasted twice as long."""

    def __init__(self, after_s: float | None) -> None:
        self.told = False
        self._after_s = after_s
        self._signs: object = None
        self._since = time.monotonic()
        self._due = 0.0

    @property
    def seconds(self) -> float:
        """Since something moved last."""
        return time.monotonic() - self._since

    def has_lasted(self, signs: object) -> bool:
        """Is it time to tell? ``signs`` differ from the last ones when something has moved."""
        now = time.monotonic()
        if signs != self._signs:
            self._signs, self._since, self._due = signs, now, now + (self._after_s or float("inf"))
            self.told = False
        if now < self._due:
            return False
        self._due = now + (now - self._since)
        self.told = True
        return True


def _outdated_text(names: Sequence[str], start_method: str) -> str:
    """Why this run takes longer to start than others."""
    what = f"{', '.join(names)}: only what a process starts with, or imports torch with, counts"
    if start_method == "forkserver":
        return f"{what}. A new fork server has the present value; it imports torch once more"
    return f"{what}. This run's ranks are started by spawn, and each imports torch itself, which takes longer"


def _by_ranks(notes: Sequence[Sequence[str]]) -> Iterator[str]:
    """Every note once, behind the numbers of the ranks that it is about."""
    for note in dict.fromkeys(itertools.chain(*notes)):
        ranks = [str(rank) for rank, its_notes in enumerate(notes) if note in its_notes]
        yield f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}: {note}"


def _state_of(worker: AnyWorker) -> str:
    if worker.report is not None:
        return "finished" if isinstance(worker.report, wire.Finished) else "ended"
    if not worker.alive:
        return "ended"
    return "running" if worker.called else "starting"


def _only_echoes(crew: AnyCrew) -> bool:
    failed = list(filter(failure.has_failed, crew.workers))
    return all(map(failure.is_echo, failed)) and len(failed) < len(crew.workers)


def _all_have_ended(crew: AnyCrew) -> bool:
    return all(worker.report is not None or not worker.alive for worker in crew.workers)
