"""Kernel side. Naming a failure: which rank's came first, and what error it is."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nbddp import wire
from nbddp.errors import CRASHES, HostLost, LaunchError, NbddpError, PayloadError, RankDied, RankError, first_line
from nbddp.kernel import stacks
from nbddp.kernel.advice import advice
from nbddp.kernel.crew import AnyWorker
from nbddp.tracebacks import hide_libraries
from nbddp.worker import entry

_LAST_LINES = 10
_CRASH_LINES = 200
_CRASHES = {getattr(signal, name) for name in CRASHES}
_DEATH_SEEN_S = 0.03  # at most so long after a rank's death its exit code is here
# gloo: "Timed out waiting 3000ms for recv operation to complete"; torch's barriers and stores say it otherwise.
_TIMED_OUT = re.compile(r"tim(ed|e) ?-?out", re.IGNORECASE)
_NUMBER = re.compile(r"\d+")
_ECHO = re.compile(r"[Cc]onnection (closed|reset) by peer|remote worker crashing|Broken pipe|Socket closed")


class BadFork(Exception):
    """No rank of this run can come from this fork server.

    Attributes:
        preloaded: what is wrong with a module that was preloaded; "" if it is not that.
        outdated: what the server has another value of than the run, which counts when a process starts or imports.
    """

    def __init__(self, preloaded: str = "", outdated: Sequence[str] = ()) -> None:
        super().__init__(preloaded or ", ".join(outdated))
        self.preloaded = preloaded
        self.outdated = tuple(outdated)


def has_failed(worker: AnyWorker) -> bool:
    """Has it raised, left, or ended without a word?"""
    return isinstance(worker.report, (wire.Failed, wire.Exited)) or (worker.report is None and not worker.alive)


def is_echo(worker: AnyWorker) -> bool:
    """Does its error tell of another rank's end?"""
    return isinstance(worker.report, wire.Failed) and _ECHO.search(worker.report.summary) is not None


def first_of(workers: Sequence[AnyWorker]) -> AnyWorker:
    """Of those that have failed, the first in time: the others' follow from it. Raises BadFork if it was that."""
    # An echo may be stamped first: gloo closes its connections before the failure they break for is raised.
    first = min(filter(has_failed, workers), key=lambda worker: (is_echo(worker), _failed_at(worker)))
    if isinstance(first.report, wire.Failed) and first.report.phase == entry.UNFIT:
        raise BadFork(preloaded=first.report.summary)
    if isinstance(first.report, wire.Failed) and first.report.phase == entry.OUTDATED:
        raise BadFork(outdated=first.report.summary.split(", "))
    return first


def all_alike(workers: Sequence[AnyWorker]) -> bool:
    """Has every rank raised the same error? Numbers in it may differ: a rank, a device, a size."""
    said = [w.report.summary for w in workers if isinstance(w.report, wire.Failed) and w.report.phase == "call"]
    return len(said) == len(workers) and len({_NUMBER.sub("0", text) for text in said}) == 1


def _failed_at(worker: AnyWorker) -> float:
    # A rank that died could not say when; its peers' broken connections follow from it within milliseconds.
    if worker.report is None:
        return (worker.exited_at or 0.0) - _DEATH_SEEN_S
    return worker.report.at


def is_timeout(worker: AnyWorker) -> bool:
    """Did it perhaps give up waiting for the other ranks? NCCL's watchdog then aborts the process."""
    if isinstance(worker.report, wire.Failed):
        return worker.report.phase == "call" and _TIMED_OUT.search(worker.report.summary) is not None
    aborted = worker.report is None and worker.exitcode == -signal.SIGABRT
    return aborted and "watchdog" in worker.output.last_lines(_LAST_LINES).lower()


@dataclass(frozen=True)
class Naming:
    """What it takes to name the failures of one run.

    Attributes:
        name: the function's.
        known: what travelled by value, for results that refer to it.
        device: the type of the ranks' devices.
    """

    name: str
    ranks: int
    known: Sequence[Any]
    device: str

    def cause_of(self, worker: AnyWorker) -> BaseException | None:
        """The exception that it raised, as far as it can be had here; None from one that did not say."""
        if not isinstance(worker.report, wire.Failed):
            return None
        try:
            cause: BaseException = worker.unpack_result(worker.report.nbytes, self.known).value
        except Exception:  # its class does not import here; its text is known
            return RuntimeError(worker.report.summary)
        hide_libraries(cause)
        return cause

    def error_of(self, worker: AnyWorker, where: str = "", *, alike: bool = False) -> NbddpError:
        """What the cell raises for this failure.

        Args:
            where: all ranks were.
            alike: have all ranks failed with the same error?
        """
        report, rank, ranks, host = worker.report, worker.rank, self.ranks, worker.host
        if isinstance(report, wire.Exited):
            text = f" ({report.text})" if report.text else ""
            return RankDied(rank, ranks, report.code, why=f"called sys.exit({report.code}){text}", host=host)
        if isinstance(report, wire.Failed):
            return self._raised(worker, report, where, alike)
        if worker.lost:
            assert host is not None
            return HostLost(host, worker.lost)
        died = self._died(worker, where)
        return died if worker.ready else LaunchError(f"before it was ready, {died}")

    def _died(self, worker: AnyWorker, where: str) -> RankDied:
        assert worker.exitcode is not None
        printed = worker.output.last_lines(_CRASH_LINES)
        crashed = -worker.exitcode in _CRASHES  # else a crash in the output is one of its children's
        printed, frames = stacks.split_crash(printed) if crashed else (printed, ())
        return RankDied(
            worker.rank,
            self.ranks,
            worker.exitcode,
            why=_why(worker) or self._out_of_memory(worker),
            stack=stacks.stack(frames),
            last_lines="\n".join(printed.rstrip("\n").split("\n")[-_LAST_LINES:]),
            where=where,
            host=worker.host,
        )

    def _out_of_memory(self, worker: AnyWorker) -> str:
        if not worker.out_of_memory:
            return ""
        return (
            "was killed by the system's OOM killer: the machine or container is out of memory. "
            "Try a smaller batch, fewer ranks or fewer DataLoader workers"
        )

    def _raised(self, worker: AnyWorker, report: wire.Failed, where: str, alike: bool) -> NbddpError:
        cause = self.cause_of(worker)
        assert cause is not None
        error: NbddpError
        if report.phase == "setup":
            on_host = f" on {worker.host}" if worker.host is not None else ""
            error = LaunchError(f"rank {worker.rank}{on_host} could not set itself up: {report.summary}")
        elif report.phase == "unpack":
            error = PayloadError(
                f"rank {worker.rank} could not unpack {self.name} and its data: {report.summary}. "
                "What they need must be importable in a new process, from the notebook's sys.path"
            )
        elif report.phase == "pack" and isinstance(cause, PayloadError):
            return cause
        else:
            what_to_do = advice(cause, self.device)
            return RankError(
                worker.rank, self.ranks, cause, where=where, host=worker.host, alike=alike, advice=what_to_do
            )
        error.__cause__ = cause
        return error

    def where_of(self, worker: AnyWorker, dump: str, step: int) -> stacks.Where:
        """Where this rank is, by what it has said and by faulthandler's dump, "" for none."""
        if isinstance(worker.report, wire.Failed):
            cause = self.cause_of(worker)
            frames = stacks.of_traceback(cause.__traceback__) if cause is not None else ()
            return stacks.Where(worker.rank, "failed", frames, step, first_line(worker.report.summary))
        if worker.report is not None:
            state = "finished" if isinstance(worker.report, wire.Finished) else "left"
            return stacks.Where(worker.rank, state, step=step)
        if not worker.alive:
            return stacks.Where(worker.rank, "ended", step=step)
        if not worker.called:
            return stacks.Where(worker.rank, "unpack" if worker.ready else "setup")
        if not dump:
            return stacks.Where(worker.rank, "silent", step=step)
        return stacks.Where(worker.rank, "called", stacks.main_thread(dump), step)


def _why(worker: AnyWorker) -> str:
    """What the exit code alone does not tell; "" when it tells enough."""
    if worker.orphaned:
        return "ended; how is not known, because something outside nbddp had ended the fork server that it came from"
    if worker.ready and not worker.called and worker.exitcode is not None and worker.exitcode >= 0:
        return f"ended with exit code {worker.exitcode} while it unpacked the function and its data"
    return ""
