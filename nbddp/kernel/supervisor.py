"""Supervises one run on a thread of its own: starts its attempts and ends the run.

On a thread, no interrupt of the notebook can break off the start or end of processes: Python raises
KeyboardInterrupt only in the main thread, where it becomes a request to stop.
"""

from __future__ import annotations

import contextlib
import threading
import time
import traceback
from collections.abc import Callable

from torch.distributed import DistError

from nbddp.errors import HostLost, LaunchError, NbddpError, RankDied, RankError
from nbddp.forkserver import server as forkserver
from nbddp.forkserver.server import UnfitServer
from nbddp.history.history import History
from nbddp.kernel.attempt import Attempt, HostsAreBack
from nbddp.kernel.hang import StallDetector
from nbddp.kernel.plan import Plan
from nbddp.kernel.state import RunState
from nbddp.latch import Once, start_thread
from nbddp.launch.interface import Site
from nbddp.launch.output import RankOutput
from nbddp.payload import Pickled
from nbddp.text import in_a_line


class Supervisor:
    """Starts, restarts and ends the ranks of one run. All public members may be used from any thread.

    Attributes:
        state: the run's state.
    """

    def __init__(self, plan: Plan, pickled: Pickled, history: History, site: Site) -> None:
        self.state = RunState()
        self._plan = plan
        self._site = site
        self._pickled = pickled  # deleted at the end
        self._history = history
        self._attempt: Attempt | None = None
        self._attempt_began = self.state.began
        self._start_method = plan.start_method
        self._fork_server_replaced = False  # for this run
        self._stall = StallDetector(plan.stall_after_s)
        self._first_failure: NbddpError | None = None  # of a run that has been restarted
        self._thread: threading.Thread | None = None
        self._start = Once()

    # ------------------------------------------------------------------ from other threads

    def start(self) -> None:
        """Start the run. A second call has no effect: after an interrupt nothing shows whether the first one worked."""
        if self._site.thread is not None:
            self._site.thread.call(self._run, self._fail_without_thread)
        else:
            start_thread(self._run, f"nbddp-{self._plan.name}", self._fail_without_thread)

    def _fail_without_thread(self, error: RuntimeError) -> None:
        if not self._start.claim():
            return
        self.state.conclude("failed", LaunchError(f"{self._plan.name} could not be started: {error}"))
        self._end()

    def join(self, timeout_s: float | None = None, or_when: Callable[[], bool] = lambda: False) -> bool:
        """Wait until the run is over and its thread has ended or stays. Returns False if the timeout is over first.

        Args:
            or_when: ends the wait, as for a latch.
        """
        if not self.state.done.wait(timeout_s, or_when):
            return False
        if self._thread is not None and threading.current_thread() is not self._thread:
            self._thread.join()
        return True

    def stacks(self) -> str:
        """Return where each rank is, as text."""
        with self.state.stacks_lock:
            crew, attempt = self.state.crew, self._attempt
            if attempt is not None and crew is not None and crew.workers:
                return attempt.locator.report()
        text = f"{self._plan.name} is {self.state.phase}: no rank is running"
        return f"{text}; when it was stopped: {self.state.stop_summary}" if self.state.stop_summary else text

    def disown(self) -> None:
        """In a process forked from the notebook kernel: hold nothing of the ranks open."""
        if self.state.crew is not None:
            self.state.crew.disown()

    # ------------------------------------------------------------------ the run's own thread

    def _run(self) -> None:
        if not self._start.claim():
            return
        if self._site.thread is None:
            self._thread = threading.current_thread()
        try:
            self._make_attempts()
        except NbddpError as error:
            if self._first_failure is not None and error is not self._first_failure:
                error.after_restarts(self.state.restarts, self._first_failure)
            _clear_frames(error)  # before the notebook can raise it, which adds the frames of its cell
            self.state.conclude("failed", error)
        except (OSError, DistError) as error:
            self.state.conclude("failed", self._refused(error))
        except BaseException as error:  # the end of this thread: an error that it does not report is lost
            failed = NbddpError(f"nbddp itself failed: {type(error).__name__}: {error}")
            failed.__cause__ = error
            self.state.conclude("failed", failed)
        finally:
            self._end()

    def _end(self) -> None:
        try:
            self._site.close()
        finally:
            self._pickled.packed.inherited.clear()
            del self._pickled
            self._history.settle(broken_off=self.state.phase != "finished")
            self.state.end()

    def _refused(self, error: Exception) -> NbddpError:
        """Return the error for a refusal by the operating system."""
        traceback.clear_frames(error.__traceback__)  # they hold the notebook's arrays
        advice = "; most often this is the limit of open files (ulimit -n)" if isinstance(error, DistError) else ""
        kind = LaunchError if self.state.phase == "starting" else NbddpError
        refused = kind(f"the system refused what {self._plan.name} needs: {error}{advice}")
        refused.__cause__ = error
        return refused

    def _make_attempts(self) -> None:
        with contextlib.ExitStack() as stack:
            for _ in range(self._plan.nprocs):
                self.state.outputs.append(RankOutput(self._site.open_output()))
                stack.callback(self.state.outputs[-1].close)
            self._site.copy_data(self._pickled, lambda: self.state.stop_grace_s is None)
            self.state.data_copied.open()
            while self.state.phase == "starting":
                self._make_attempt()

    def _make_attempt(self) -> None:
        """Make one attempt, unless a stop was requested; the phase is ``starting`` again if there is to be another."""
        if self.state.stop_grace_s is not None:
            return self.state.conclude("stopped")
        self._attempt_began = time.monotonic()
        # No name of this frame for the crew: as long as the error of a failed attempt is kept, it keeps this frame.
        self._attempt = Attempt(
            self._plan,
            self._pickled.packed,
            self._site.new_crew(self._start_method),
            self.state,
            self._history,
            self._stall,
        )
        try:
            self._attempt.run()
        except UnfitServer as error:
            self._start_otherwise(error)
        except HostsAreBack as back:
            self._site.remember_snapshots(self._history.take_snapshots())
            self.state.grown += 1
            self._begin_again(f"the return of {back}")
        except (RankError, RankDied, HostLost, LaunchError) as error:  # any other error would be raised again
            if self.state.stop_grace_s is not None or self._failures == self._plan.max_restarts:
                raise
            self._site.remember_snapshots(self._history.take_snapshots())
            if not self._site.can_restart():
                raise
            _clear_frames(error)
            self._first_failure = self._first_failure or error
            self._begin_again(in_a_line(error).partition("; most often")[0])
        finally:
            self._attempt = None
        return None

    @property
    def _failures(self) -> int:
        """The number of restarts that count against ``max_restarts``."""
        return self.state.restarts - self.state.grown

    def _begin_again(self, reason: str) -> None:
        """Let the next attempt follow, and say why."""
        self.state.restart(reason)
        self._history.restart(reason)
        allowed = self._plan.max_restarts + self.state.grown
        for output in self.state.outputs:
            output.note(f"restarted {self.state.restarts} of {allowed} after {reason}")

    def _start_otherwise(self, error: UnfitServer) -> None:
        """Choose how the next attempt starts its ranks, which its fork server cannot start, and note why."""
        self._start_method = self._method_after(error)
        if not error.outdated:
            why = error.preloaded or "the fork server initialised CUDA"
            for output in self.state.outputs:
                output.note(f"started again by {self._start_method}: {why}")
            return
        names = ", ".join(error.outdated)
        note = f"{names}: only what a process starts with, or imports torch with, counts"
        if self._start_method == "forkserver":
            note += ". A new fork server has the present value; it imports torch once more"
        else:
            note += ". This run's ranks are started by spawn, and each imports torch itself, which takes longer"
        self.state.outputs[0].note(note)

    def _method_after(self, error: UnfitServer) -> str:
        if self._plan.shares:  # the fork server of a remote host
            return "spawn"
        if not error.outdated:
            return forkserver.start_method_if_unfit(preloaded=error.preloaded)
        if self._fork_server_replaced:
            return "spawn"
        self._fork_server_replaced = True
        return forkserver.start_method_if_outdated(error.outdated, self._plan.environ, since=self._attempt_began)


def _clear_frames(error: BaseException) -> None:
    """Clear the frames that an error keeps alive: their variables are the crews and the notebook's objects."""
    for each in filter(None, (error, error.__context__)):
        traceback.clear_frames(each.__traceback__)
    # A rank's traceback was rebuilt while its exception was unpickled, so the frames of that are its callers.
    rebuilt = error.__cause__.__traceback__ if error.__cause__ is not None else None
    frame = rebuilt.tb_frame.f_back if rebuilt is not None else None
    while frame is not None:
        with contextlib.suppress(RuntimeError):  # the frame still runs
            frame.clear()
        frame = frame.f_back
