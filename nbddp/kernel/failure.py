"""Finds the rank that failed first, and builds the error that the cell raises."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nbddp import wire
from nbddp.errors import CRASHES, HostLost, LaunchError, NbddpError, PayloadError, RankDied, RankError
from nbddp.forkserver.server import UnfitServer
from nbddp.kernel import stacks
from nbddp.kernel.advice import advice, advice_on_a_host
from nbddp.launch import dumps
from nbddp.launch.interface import Rank
from nbddp.text import first_line
from nbddp.tracebacks import hide_libraries

_LAST_LINES = 10
_CRASH_LINES = 200
_CRASHES = {getattr(signal, name) for name in CRASHES}
_EXIT_DELAY_S = 0.03  # the exit code arrives at most this long after a rank's death
# gloo: "Timed out waiting 3000ms for recv operation to complete"; torch's barriers and stores use other words.
_TIMED_OUT = re.compile(r"tim(ed|e) ?-?out", re.IGNORECASE)
_NUMBER = re.compile(r"\d+")
_CONSEQUENCE = re.compile(
    r"[Cc]onnection (closed|reset) by peer|remote worker crashing|Broken pipe|Socket closed"
    r"|ncclRemoteError|NCCL communicator was aborted"
)
_NCCL_TIMEOUT = "collective operation timeout"  # in the text with which NCCL's watchdog aborts


def has_failed(worker: Rank) -> bool:
    """Return whether the rank raised, left early, or ended without a report."""
    if worker.report is None:
        return not worker.alive
    return not isinstance(worker.report, wire.Finished)


def is_consequence(worker: Rank) -> bool:
    """Return whether the rank's error only follows from another rank's end."""
    return isinstance(worker.report, wire.Failed) and is_consequence_text(worker.report.summary)


def is_consequence_text(summary: str) -> bool:
    """Return whether an error of this text only follows from another rank's end."""
    return _CONSEQUENCE.search(summary) is not None


def first_of(workers: Sequence[Rank]) -> Rank:
    """Return the rank that failed first, from which the others' failures follow.

    Raises:
        UnfitServer: the first failure is that the rank cannot run in a process of its fork server.
    """

    def failed_at(worker: Rank) -> float:
        if worker.report is None:  # it died; its peers' broken connections follow within milliseconds
            return (worker.exited_at or 0.0) - _EXIT_DELAY_S
        return worker.report.at

    # A consequence may be reported first: gloo closes its connections before the error that closes them is raised.
    # A session interrupts the other ranks; the clocks of two hosts are not known well enough to put that in order.
    def follows(worker: Rank) -> bool:
        return is_consequence(worker) or (
            isinstance(worker.report, wire.Failed) and worker.report.summary.endswith("KeyboardInterrupt")
        )

    first = min(filter(has_failed, workers), key=lambda worker: (follows(worker), failed_at(worker)))
    if isinstance(first.report, wire.Unfit):
        raise UnfitServer(first.report.preloaded, first.report.outdated)
    return first


def all_alike(workers: Sequence[Rank]) -> bool:
    """Return whether every rank raised the same error, up to the numbers in its text: a rank, a device, a size."""
    texts = [w.report.summary for w in workers if isinstance(w.report, wire.Failed) and w.report.phase == "call"]
    return len(texts) == len(workers) and len({_NUMBER.sub("0", text) for text in texts}) == 1


def is_timeout(worker: Rank) -> bool:
    """Return whether the rank timed out waiting for the others; NCCL's watchdog then aborts the process."""
    if isinstance(worker.report, wire.Failed):
        return worker.report.phase == "call" and _TIMED_OUT.search(worker.report.summary) is not None
    aborted = worker.report is None and worker.exitcode == -signal.SIGABRT
    return aborted and _NCCL_TIMEOUT in worker.output.last_lines(_CRASH_LINES)


@dataclass
class Failures:
    """The failures of one run's ranks, as errors and locations.

    Attributes:
        name: the name of the function.
        ranks: the number of ranks.
        known: functions and classes that were sent by value, to which exceptions of the ranks may refer.
        device: the type of the ranks' devices.
        called: the ranks that take part in the call; None: all.
    """

    name: str
    ranks: int
    known: Sequence[Any]
    device: str
    called: Sequence[int] | None = None

    def cause_of(self, worker: Rank) -> BaseException | None:
        """Return the exception that a rank raised, or a stand-in if it cannot be unpickled here; None for none."""
        if not isinstance(worker.report, wire.Failed):
            return None
        try:
            cause: BaseException = worker.unpack_result(worker.report.nbytes, self.known).value
        except Exception:  # its class cannot be imported here
            return RuntimeError(worker.report.summary)
        hide_libraries(cause)
        return cause

    def error_of(self, worker: Rank, where: str = "", *, alike: bool = False) -> NbddpError:
        """Return the error that the cell raises for this failure.

        Args:
            where: where all ranks were, in one line; "" if that is not known.
            alike: all ranks failed with the same error.
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

    def _died(self, worker: Rank, where: str) -> RankDied:
        assert worker.exitcode is not None
        printed = worker.output.last_lines(_CRASH_LINES)
        crashed = -worker.exitcode in _CRASHES  # otherwise a crash in the output is that of a child
        printed, frames = dumps.split_crash(printed) if crashed else (printed, ())
        return RankDied(
            worker.rank,
            self.ranks,
            worker.exitcode,
            why=_why_it_died(worker),
            stack=stacks.stack(frames),
            last_lines="\n".join(printed.rstrip("\n").split("\n")[-_LAST_LINES:]),
            where=where,
            host=worker.host,
        )

    def _raised(self, worker: Rank, report: wire.Failed, where: str, alike: bool) -> NbddpError:
        cause = self.cause_of(worker)
        assert cause is not None
        error: NbddpError
        if report.phase == "setup":
            known = f". {self._advice(cause, worker)}".rstrip(". ")
            what = f"rank {worker.rank}{_on_host(worker)} could not set itself up: {report.summary}"
            error = LaunchError(f"{what}{known}")
        elif report.phase == "unpack":
            error = PayloadError(
                f"rank {worker.rank}{_on_host(worker)} could not unpack {self.name} and its data: {report.summary}. "
                + (
                    advice_on_a_host(cause, worker)
                    or "The modules that they use must be importable in a new process, from the notebook's sys.path"
                )
            )
        elif report.phase == "pack" and isinstance(cause, PayloadError):
            return cause
        else:
            return RankError(
                worker.rank,
                self.ranks,
                cause,
                where=where,
                host=worker.host,
                alike=alike,
                advice=self._advice(cause, worker),
                locals=dict(report.names),
            )
        error.__cause__ = cause
        return error

    def _advice(self, cause: BaseException, worker: Rank) -> str:
        return ". ".join(filter(None, [advice(cause, self.device), advice_on_a_host(cause, worker)]))

    def location_of(self, worker: Rank, dump: str, step: int) -> stacks.Location:
        """Return where this rank is, from its report and faulthandler's dump ("" for none)."""
        if isinstance(worker.report, wire.Failed):
            cause = self.cause_of(worker)
            frames = stacks.of_traceback(cause.__traceback__) if cause is not None else ()
            return stacks.Location(worker.rank, "failed", frames, step, first_line(worker.report.summary))
        if worker.report is not None:
            state = "finished" if isinstance(worker.report, wire.Finished) else "left"
            if self.called is not None and worker.rank not in self.called:
                state = "outside"
            return stacks.Location(worker.rank, state, step=step)
        if not worker.alive:
            return stacks.Location(worker.rank, "ended", step=step)
        if not worker.pid:  # on a host that waits for its data
            return stacks.Location(worker.rank, "awaited")
        if not worker.called:
            return stacks.Location(worker.rank, "unpack" if worker.ready else "setup")
        if not dump:
            return stacks.Location(worker.rank, "silent", step=step)
        return stacks.Location(worker.rank, "called", dumps.main_thread(dump), step)


def _on_host(worker: Rank) -> str:
    return f" on {worker.host}" if worker.host is not None else ""


def _why_it_died(worker: Rank) -> str:
    """Return an explanation that the exit code alone does not give; "" otherwise."""
    if worker.orphaned:
        return "ended with an unknown exit code, because something outside nbddp had ended its fork server"
    if worker.ready and not worker.called and worker.exitcode is not None and worker.exitcode >= 0:
        return f"ended with exit code {worker.exitcode} while it unpacked the function and its data"
    if worker.out_of_memory:
        return (
            "was killed by the system's OOM killer: the machine or container is out of memory. "
            "Try a smaller batch, fewer ranks or fewer DataLoader workers"
        )
    return ""
