"""Kernel side. One run from its first process to its last, on a thread of its own.

A thread, so that no interrupt of the notebook can land in the middle of starting or ending processes:
Python raises KeyboardInterrupt in the main thread alone, and there it becomes a request to stop.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable
from typing import Any, BinaryIO

import psutil

from nbddp import wire
from nbddp.errors import LaunchError, NbddpError, PayloadError, RankDied, RankError, RunTimeout
from nbddp.kernel import forkserver, oom, stacks
from nbddp.kernel.history import History
from nbddp.kernel.launcher import LEAVE_GRACE_S, Crew, Worker
from nbddp.kernel.output import RankOutput, open_output
from nbddp.kernel.plan import Plan
from nbddp.kernel.rendezvous import Rendezvous, open_rendezvous
from nbddp.payload import Packed
from nbddp.tracebacks import drop_our_frames
from nbddp.worker.entry import BAD_FORK

_TICK_S = 0.1  # how often metrics and output are read while nothing else happens
_PEERS_GRACE_S = 0.2  # for the other ranks' finally blocks when one has failed
_FAILURE_WINDOW_S = 0.1  # how much later than its consequence a failure may be heard of
_STACKS_S = 1.0
_LAST_LINES = 10
_MUCH_BYTES = 128 << 10  # of metrics at once: the rank logs faster than we look
_DEATH_SEEN_S = 0.03  # at most so long after a rank's death its exit code is here


class Supervisor:
    """Starts the ranks of one run, follows them, ends them. All public members may be used from any thread.

    Attributes:
        state: ``starting running finished failed stopped``.
        error: what a failed run raises.
        values: by rank, of a finished run.
        done: set when every process is gone and every fd is closed.
    """

    def __init__(self, plan: Plan, packed: Packed, block: BinaryIO, history: History) -> None:
        self.state = "starting"
        self.error: BaseException | None = None
        self.values: list[Any] | None = None
        self.done = threading.Event()
        self.outputs: list[RankOutput] = []
        self.began = time.monotonic()
        self.ended: float | None = None
        self._plan = plan
        self._deadline = self.began + (plan.timeout_s or float("inf"))
        self._packed = packed
        self._block = block
        self._history = history
        self._lock = threading.Lock()  # over what another thread may ask of the crew while its fds are open
        self._crew: Crew | None = None
        self._rank_states: list[str] = []
        self._pids: list[int] = []
        self._stop_grace_s: float | None = None
        self._callbacks: list[Callable[[], None]] = []
        self._start_method = plan.start_method
        self._oom_kills = oom.kills()
        self._thread = threading.Thread(target=self._live, name=f"nbddp-{plan.name}", daemon=True)

    # ------------------------------------------------------------------ from other threads

    def start(self) -> None:
        self._thread.start()

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
        if threading.current_thread() is not self._thread:
            self._thread.join()
        return True

    def when_done(self, callback: Callable[[], None]) -> None:
        """Call back when the run is over, on the run's thread; at once if it is."""
        with self._lock:
            if not self.done.is_set():
                self._callbacks.append(callback)
                return
        callback()

    def stacks(self) -> str:
        """Where each rank is, as text."""
        with self._lock:
            if self._crew is None:
                return f"{self._plan.name} is {self.state}: no rank is running"
            return "\n\n".join(_stack_of(worker) for worker in self._crew.workers)

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
            self._attempts()
        except NbddpError as error:
            self._conclude("failed", error)
        except BaseException as error:  # the end of this thread: what it does not report is lost
            self._conclude("failed", NbddpError(f"nbddp itself failed: {type(error).__name__}: {error}"))
            assert self.error is not None
            self.error.__cause__ = error
        finally:
            self._block.close()
            self._packed.inherited.clear()
            self._history.settle()
            self.ended = time.monotonic()
            with self._lock:
                self.done.set()
                callbacks, self._callbacks = self._callbacks, []
            for callback in callbacks:
                callback()

    def _conclude(self, state: str, error: BaseException | None = None) -> None:
        self.error = error
        self.state = state

    def _attempts(self) -> None:
        with contextlib.ExitStack() as stack:
            for _ in range(self._plan.nprocs):
                self.outputs.append(RankOutput(open_output()))
                stack.callback(self.outputs[-1].close)
            self._attempt_until_it_counts()

    def _attempt_until_it_counts(self) -> None:
        restarts = 0
        while True:
            try:
                self._attempt(restarts)
                return
            except _BadFork:
                forkserver.mark_unfit()
                self._start_method = "spawn"
            except (RankError, RankDied, LaunchError) as error:  # the others would fail again
                if restarts == self._plan.max_restarts or self._stop_grace_s is not None:
                    raise
                restarts += 1
                self._history.restart()
                self._tell_of_restart(restarts, error)

    def _tell_of_restart(self, count: int, error: NbddpError) -> None:
        why = str(error).split("\n")[0]
        for output in self.outputs:
            output.note(f"restarted {count} of {self._plan.max_restarts} after {type(error).__name__}: {why}")

    def _attempt(self, restart_count: int) -> None:
        """Start all ranks and follow them to their end. Raises what the first failure is."""
        with contextlib.ExitStack() as stack:
            rendezvous = stack.enter_context(open_rendezvous(self._plan.nprocs))
            crew = Crew(self._start_method)
            stack.callback(self._let_go)
            stack.callback(self._feed_all, crew)  # what the ranks wrote before they ended
            stack.enter_context(crew)
            with self._lock:
                self._crew = crew
            jobs = self._jobs(rendezvous, restart_count)
            crew.start(jobs, self.outputs, self._block.fileno(), self._packed.inherited)
            self._follow(crew)

    def _let_go(self) -> None:
        self.rank_states(), self.pids()  # the last ones, for who asks later
        with self._lock:
            assert self._crew is not None
            self._crew.close()
            self._crew = None

    def _jobs(self, rendezvous: Rendezvous, restart_count: int) -> list[wire.Job]:
        plan = self._plan
        return [
            wire.Job(
                run_name=plan.name,
                rank=rank,
                local_rank=rank,
                world_size=plan.nprocs,
                local_world_size=plan.nprocs,
                device=plan.device,
                backend=plan.backend,
                store_port=rendezvous.port,
                store_prefix=rendezvous.prefix,
                pg_timeout_s=plan.pg_timeout_s,
                seed=plan.seed,
                deterministic=plan.deterministic,
                threads=plan.threads,
                environ=plan.rank_environ(rank, rendezvous, restart_count),
                sys_path=plan.sys_path,
                cwd=plan.cwd,
                argv=plan.argv,
                payload_nbytes=self._packed.nbytes,
                pass_rank=plan.pass_rank,
                restart_count=restart_count,
            )
            for rank in range(plan.nprocs)
        ]

    def _follow(self, crew: Crew) -> None:
        more = False
        while True:
            crew.watch(0.0 if more else max(0.0, min(_TICK_S, self._deadline - time.monotonic())))
            more = self._feed(crew)
            if self.state == "starting" and crew.ready:
                self.state = "running"
            if self._stop_grace_s is not None:
                self._wind_down(crew, lambda: self._stop_grace_s or 0.0)
                return self._conclude("stopped")
            if any(map(_has_failed, crew.workers)):
                return self._fail(crew)
            if all(isinstance(worker.report, wire.Finished) for worker in crew.workers):
                return self._succeed(crew)
            if time.monotonic() >= self._deadline:
                self._time_out(crew)

    def _feed(self, crew: Crew) -> bool:
        """Take in what the ranks have logged, a part of it. Returns whether there may be more."""
        more = False
        for worker in crew.workers:
            if data := worker.read_metrics():
                self._history.feed(worker.rank, data)
                more = more or len(data) >= _MUCH_BYTES
        return more

    def _feed_all(self, crew: Crew) -> None:
        for worker in crew.workers:
            while data := worker.read_metrics():
                self._history.feed(worker.rank, data)

    def _succeed(self, crew: Crew) -> None:
        values = self._plan.receive([self._result_of(worker) for worker in crew.workers])
        crew.dismiss_reported()
        # What is left are exit handlers and threads: a stop or the end of the time need not wait for them.
        leave_by = min(time.monotonic() + LEAVE_GRACE_S, self._deadline)
        self._watch_until(crew, leave_by, or_when=lambda _: self._stop_grace_s is not None)
        self.values = values
        self._conclude("finished")

    def _result_of(self, worker: Worker) -> Any:
        assert isinstance(worker.report, wire.Finished)
        try:
            return worker.unpack_result(worker.report.nbytes, self._packed.by_value)
        except Exception as error:  # whatever unpickling a user's object raises
            drop_our_frames(error)
            raise PayloadError(
                f"what {self._plan.name} returned on rank {worker.rank} cannot be unpacked in the notebook: "
                f"{type(error).__name__}: {error}"
            ) from error

    def _fail(self, crew: Crew) -> None:
        """Raise the failure that came first; the other ranks are stopped at once."""
        self._watch_until(crew, time.monotonic() + _FAILURE_WINDOW_S, or_when=_all_have_ended)
        first = min(filter(_has_failed, crew.workers), key=_failed_at)
        if isinstance(first.report, wire.Failed) and BAD_FORK in first.report.summary:
            raise _BadFork
        error = self._error_of(first)
        self._wind_down(crew, lambda: _PEERS_GRACE_S)
        raise error

    def _time_out(self, crew: Crew) -> None:
        where = "\n\n".join(_stack_of(worker) for worker in crew.workers)
        self._wind_down(crew, lambda: _PEERS_GRACE_S)
        raise RunTimeout(
            f"{self._plan.name} was still {self.state} after its timeout of {self._plan.timeout_s} s and was "
            f"stopped. It was here:\n{where}"
        )

    def _wind_down(self, crew: Crew, grace_s: Callable[[], float]) -> None:
        """KeyboardInterrupt in the ranks, and time for their ``finally``; the crew's end kills the rest."""
        began = time.monotonic()
        crew.interrupt()
        while crew.alive and (left := began + grace_s() - time.monotonic()) > 0:
            crew.dismiss_reported()
            crew.watch(min(_TICK_S, left))
            self._feed(crew)

    def _watch_until(self, crew: Crew, deadline: float, or_when: Callable[[Crew], bool] | None = None) -> None:
        while crew.alive and (left := deadline - time.monotonic()) > 0 and not (or_when and or_when(crew)):
            crew.watch(min(_TICK_S, left))
            self._feed(crew)

    # ------------------------------------------------------------------ naming a failure

    def _error_of(self, worker: Worker) -> NbddpError:
        report, rank, ranks = worker.report, worker.rank, self._plan.nprocs
        if isinstance(report, wire.Exited):
            text = f" ({report.text})" if report.text else ""
            return RankDied(rank, ranks, report.code, why=f"called sys.exit({report.code}){text}")
        if isinstance(report, wire.Failed):
            return self._raised(worker, report)
        assert worker.exitcode is not None
        died = RankDied(
            rank,
            ranks,
            worker.exitcode,
            why=_why(worker) or self._out_of_memory(worker),
            last_lines=worker.output.last_lines(_LAST_LINES),
        )
        return died if worker.ready else LaunchError(f"before it was ready, {died}")

    def _out_of_memory(self, worker: Worker) -> str:
        if worker.exitcode != -signal.SIGKILL or oom.kills() == self._oom_kills:
            return ""
        return (
            "was killed by the system's OOM killer: the machine or container is out of memory. "
            "Try a smaller batch, fewer ranks or fewer DataLoader workers"
        )

    def _raised(self, worker: Worker, report: wire.Failed) -> NbddpError:
        try:
            cause = worker.unpack_result(report.nbytes, self._packed.by_value)
        except Exception:  # its class does not import here; its text is known
            cause = RuntimeError(report.summary)
        error: NbddpError
        if report.phase == "setup":
            error = LaunchError(f"rank {worker.rank} could not set itself up: {report.summary}")
        elif report.phase == "unpack":
            error = PayloadError(
                f"rank {worker.rank} could not unpack {self._plan.name} and its data: {report.summary}. "
                "What they need must be importable in a new process, from the notebook's sys.path"
            )
        elif report.phase == "pack" and isinstance(cause, PayloadError):
            return cause
        else:
            return RankError(worker.rank, self._plan.nprocs, cause)
        error.__cause__ = cause
        return error


class _BadFork(Exception):
    """The fork server has a CUDA context, which no fork can use."""


def _has_failed(worker: Worker) -> bool:
    return isinstance(worker.report, (wire.Failed, wire.Exited)) or (worker.report is None and not worker.alive)


def _state_of(worker: Worker) -> str:
    if worker.report is not None:
        return "finished" if isinstance(worker.report, wire.Finished) else "ended"
    if not worker.alive:
        return "ended"
    return "running" if worker.called else "starting"


def _failed_at(worker: Worker) -> float:
    # A rank that died could not say when; its peers' broken connections follow from it within milliseconds.
    if worker.report is None:
        return (worker.exited_at or 0.0) - _DEATH_SEEN_S
    return worker.report.at


def _all_have_ended(crew: Crew) -> bool:
    return all(worker.report is not None or not worker.alive for worker in crew.workers)


def _why(worker: Worker) -> str:
    """What the exit code alone does not tell; "" when it tells enough."""
    server = forkserver.pid()
    if worker.exitcode == 255 and server is not None and not _runs(server):
        return "was lost with the fork server that it came from, which something outside nbddp ended"
    if worker.ready and not worker.called and worker.exitcode is not None and worker.exitcode >= 0:
        return f"ended with exit code {worker.exitcode} while it unpacked the function and its data"
    return ""


def _runs(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    return False


def _stack_of(worker: Worker) -> str:
    if worker.report is not None:
        return stacks.render(worker.rank, "", "has reported, and waits for the others")
    if not worker.alive:
        return stacks.render(worker.rank, "", "has ended")
    if not worker.ready:
        return stacks.render(worker.rank, "", "is still setting itself up")
    dump = worker.ask_for_stacks(_STACKS_S)
    return stacks.render(worker.rank, dump, "is here" if dump else "gives no answer")
