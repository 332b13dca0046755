"""Host side. What becomes of the ranks of one round, told to the kernel as it happens."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from nbddp import frames, wire
from nbddp.frames import Head
from nbddp.kernel.gauges import Gauges
from nbddp.kernel.launcher import Crew
from nbddp.kernel.local_worker import Worker

if TYPE_CHECKING:
    from nbddp.host.service import Pipe

_NAP_S = 0.05
_MOST_BACKLOG = 16 << 20  # bytes that the kernel has not read: what the ranks log then waits in their pipes
_READ_BYTES = 256 << 10
_ALL = float("inf")  # bytes


class News:
    """Of one crew: output, metrics, states, last words, ends, memory.

    Large results take turns; all else goes first, so that a failure is not told after gigabytes of another rank.
    """

    def __init__(self, crew: Crew, pipe: Pipe, gauges: Gauges) -> None:
        self._crew = crew
        self._pipe = pipe
        self._gauges = gauges
        self._told: dict[int, _Told] = {}
        self._results: list[tuple[frames.BlockFrames, Head]] = []
        self._results_wanted = True

    def tell_all(self) -> None:
        """What the ranks wrote before they ended, whole."""
        while self.tell():
            pass

    def drop_results(self) -> None:
        """Nobody reads them any more: the rest shall not wait behind gigabytes."""
        self._results_wanted = False
        for block, report in self._results:
            if block.drop():
                self._pipe.send(report)
        self._results.clear()

    def tell(self) -> bool:
        """What is new of each rank. Returns whether there may be more."""
        if self._pipe.backlog > _MOST_BACKLOG:
            time.sleep(_NAP_S)
            return True
        more = [self._tell_of(worker, self._told.setdefault(worker.rank, _Told())) for worker in self._crew.workers]
        if more:
            self._tell_of_memory()
        return any(more)

    def _tell_of(self, worker: Worker, told: _Told) -> bool:
        rank = worker.rank
        if (worker.ready, worker.called) != told.state:
            told.state = (worker.ready, worker.called)
            self._pipe.send_first({"kind": "state", "rank": rank, "ready": worker.ready, "called": worker.called})
        told.notice_end_of(worker)
        # What it has written before what has become of it: the end of its output belongs to its error.
        output = os.pread(worker.output.fileno(), _READ_BYTES, told.printed)
        told.printed += len(output)
        if output:
            self._pipe.send_first({"kind": "output", "rank": rank}, output)
        metrics = worker.read_metrics()
        if metrics:
            self._pipe.send_first({"kind": "metrics", "rank": rank}, metrics)
        self._tell_of_its_end(worker, told, told.printed if output else _ALL)
        return bool(metrics or (output and not told.exit))

    def _tell_of_its_end(self, worker: Worker, told: _Told, printed: float) -> None:
        if worker.report is not None and not told.report and printed >= told.report_after:
            told.report = True
            told.in_turn = self._tell_report(worker, worker.report)
        if worker.exitcode is not None and not told.exit and printed >= told.exit_after:
            told.exit = True
            send = self._pipe.send if told.in_turn else self._pipe.send_first
            send(
                {
                    "kind": "exit",
                    "rank": worker.rank,
                    "exitcode": worker.exitcode,
                    "at": worker.exited_at,
                    "orphaned": worker.orphaned,
                    "out_of_memory": worker.out_of_memory,
                }
            )

    def _tell_report(self, worker: Worker, report: wire.Finished | wire.Failed | wire.Exited) -> bool:
        """Tell it after the result. Returns whether both take their turn, so that its exit must, too."""
        head = {"kind": "report", "rank": worker.rank, "type": type(report).__name__, **vars(report)}
        nbytes = 0 if isinstance(report, wire.Exited) or not self._results_wanted else report.nbytes
        if nbytes > frames.CHUNK:
            block = frames.BlockFrames(worker.result_fd, nbytes, then=[head], kind="result", rank=worker.rank)
            self._results.append((block, head))
            self._pipe.send_all(block)
            return True
        if nbytes:
            result = os.pread(worker.result_fd, nbytes, 0)
            self._pipe.send_first({"kind": "result", "rank": worker.rank, "at": 0, "nbytes": nbytes}, result)
        self._pipe.send_first(head)
        return False

    def _tell_of_memory(self) -> None:
        before = dict(self._gauges.processes), dict(self._gauges.gpus)
        self._gauges.read([worker.pid for worker in self._crew.workers])
        if before != (self._gauges.processes, self._gauges.gpus):
            first = self._crew.workers[0].rank
            processes = {first + local: used for local, used in self._gauges.processes.items()}
            gpus = {first + local: memory for local, memory in self._gauges.gpus.items()}
            self._pipe.send_first({"kind": "gauges", "processes": processes, "gpus": gpus})


class _Told:
    """What the kernel knows of a rank, and how much of its output is to come before its report and its exit."""

    def __init__(self) -> None:
        self.printed = 0
        self.state = (False, False)
        self.report = False
        self.exit = False
        self.in_turn = False  # its report waits behind its result, and that behind others'
        self.report_after = self.exit_after = _ALL

    def notice_end_of(self, worker: Worker) -> None:
        """Remember where its output ended first: a thread or child of it may go on to print for ever."""
        size = os.fstat(worker.output.fileno()).st_size
        if worker.report is not None:
            self.report_after = min(self.report_after, size)
        if worker.exitcode is not None:
            self.exit_after = min(self.exit_after, size)
