"""Reports to the notebook kernel what the ranks of one round do: output, metrics, states, results, exits, memory."""

from __future__ import annotations

import os
import time

from nbddp import wire
from nbddp.agent.pipe import ControlPipe
from nbddp.hosts import frames
from nbddp.hosts.frames import Header
from nbddp.launch.crew import LocalCrew
from nbddp.launch.gauges import LocalGauges
from nbddp.launch.rank import LocalRank

_POLL_S = 0.05
_MAX_BACKLOG = 16 << 20  # bytes that the notebook kernel has not read; beyond this, metrics wait in the ranks' pipes
_READ_BYTES = 256 << 10
_LAST_BYTES = 64 << 10  # of each rank's output, when the round is over
_PIPES_OF_METRICS = 8  # reads after which a pipe of 1 MB is empty, unless a thread goes on to log
_LEFT_OUT = b"\n[output was left out here: it was not sent before the run ended]\n"
_INFINITE_BYTES = float("inf")
_SAID = {wire.Asks: "asks", wire.GoesOn: "goes on"}  # by the debugger of a rank


class Reporter:
    """Reports on the ranks of one crew.

    Large results are queued in turn; everything else goes ahead of them, so that a failure is not reported after
    gigabytes of another rank.
    """

    def __init__(self, crew: LocalCrew, pipe: ControlPipe, gauges: LocalGauges) -> None:
        self._crew = crew
        self._pipe = pipe
        self._gauges = gauges
        self._reported: dict[int, _Reported] = {}
        self._results: list[tuple[frames.BlockFrames, Header]] = []
        self._send_results = True
        self._only_last_lines = False

    def report_all(self) -> None:
        """Report everything that the ranks wrote before they ended."""
        while self.report():
            pass

    def begin_call(self, rank: int) -> None:
        """Report the next call of a session's rank from its beginning."""
        self._reported[rank] = _Reported()
        self._send_results = True

    def report_call(self) -> None:
        """Report what the ranks have written in a call that is over; a thread of theirs may go on to print for ever."""
        sizes = {worker.rank: os.fstat(worker.output.fileno()).st_size for worker in self._crew.workers}
        left = _PIPES_OF_METRICS
        while self.report() and left:
            left -= all(self._reported[rank].output_nbytes >= size for rank, size in sizes.items())

    def drop_results(self) -> None:
        """Send no more results: the notebook kernel does not read them, and other reports would wait behind them."""
        self._send_results = False
        for block, header in self._results:
            if block.drop():
                self._pipe.send(header)
        self._results.clear()

    def skip_to_last_lines(self) -> None:
        """Report the last lines of output alone: the round is over, and its end is not to wait behind a flood."""
        self._only_last_lines = True
        self._pipe.drop_output()

    def report(self) -> bool:
        """Report what is new of each rank. Returns whether there may be more."""
        if self._pipe.backlog > _MAX_BACKLOG and not self._only_last_lines:
            time.sleep(_POLL_S)
            return True
        workers = self._crew.workers
        more = [self._report_rank(each, self._reported.setdefault(each.rank, _Reported())) for each in workers]
        before = dict(self._gauges.processes), dict(self._gauges.gpus)
        self._gauges.read([worker.pid for worker in workers])
        if before != (self._gauges.processes, self._gauges.gpus):
            first = workers[0].rank
            processes = {first + local: used for local, used in self._gauges.processes.items()}
            gpus = {first + local: memory for local, memory in self._gauges.gpus.items()}
            self._pipe.send_first({"kind": "gauges", "processes": processes, "gpus": gpus})
        return any(more)

    def _report_rank(self, worker: LocalRank, reported: _Reported) -> bool:
        rank = worker.rank
        state = ready, called = worker.ready, worker.called
        if state != reported.state:
            reported.state = state
            self._pipe.send_first({"kind": "state", "rank": rank, "ready": ready, "called": called})
        reported.note_end_of(worker)
        # Output goes before the report and the exit: its last lines belong to the rank's error.
        if self._only_last_lines and reported.skip_output(os.fstat(worker.output.fileno()).st_size - _LAST_BYTES):
            self._pipe.send_first({"kind": "output", "rank": rank}, _LEFT_OUT)
        output = os.pread(worker.output.fileno(), _READ_BYTES, reported.output_nbytes)
        reported.output_nbytes += len(output)
        if output:
            self._pipe.send_first({"kind": "output", "rank": rank}, output)
        while worker.said:
            said = worker.said.popleft()
            self._pipe.send_first({"kind": _SAID[type(said)], "rank": rank, **vars(said)})
        if worker.regrouped is not None:
            self._pipe.send_first({"kind": "regrouped", "rank": rank, **vars(worker.regrouped)})
            worker.regrouped = None
        metrics = worker.read_metrics()
        if metrics:
            self._pipe.send_first({"kind": "metrics", "rank": rank}, metrics)
        self._report_end(worker, reported, reported.output_nbytes if output else _INFINITE_BYTES)
        return bool(metrics or (output and not reported.exit))

    def _report_end(self, worker: LocalRank, reported: _Reported, output_nbytes: float) -> None:
        if worker.report is not None and not reported.report and output_nbytes >= reported.report_after:
            reported.report = True
            reported.queued = self._send_report(worker, worker.report)
        if worker.exitcode is not None and not reported.exit and output_nbytes >= reported.exit_after:
            reported.exit = True
            send = self._pipe.send if reported.queued else self._pipe.send_first
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

    def _send_report(self, worker: LocalRank, report: wire.Report) -> bool:
        """Send the result, then the report. Returns whether both are queued in turn, as the exit must be then."""
        header = {"kind": "report", "rank": worker.rank, "type": type(report).__name__, **vars(report)}
        nbytes = 0 if isinstance(report, wire.Exited) or not self._send_results else report.nbytes
        if nbytes > frames.CHUNK:
            block = frames.BlockFrames(worker.result_fd, nbytes, then=[header], kind="result", rank=worker.rank)
            self._results.append((block, header))
            self._pipe.send_all(block)
            return True
        if nbytes:
            result = os.pread(worker.result_fd, nbytes, 0)
            self._pipe.send_first({"kind": "result", "rank": worker.rank, "at": 0, "nbytes": nbytes}, result)
        self._pipe.send_first(header)
        return False


class _Reported:
    """What has been reported of a rank.

    Attributes:
        queued: whether the report waits behind large results, its own or others'.
        report_after: bytes of output that go before the report.
        exit_after: bytes of output that go before the exit.
    """

    def __init__(self) -> None:
        self.output_nbytes = 0
        self.state = (False, False)
        self.report = False
        self.exit = False
        self.queued = False
        self.report_after = self.exit_after = _INFINITE_BYTES

    def skip_output(self, to: int) -> bool:
        """Skip the output before this offset. Returns whether there was any."""
        skipped, self.output_nbytes = self.output_nbytes < to, max(self.output_nbytes, to)
        return skipped

    def note_end_of(self, worker: LocalRank) -> None:
        """Note how much output there was at the end: a thread or child of the rank may go on to print for ever."""
        size = os.fstat(worker.output.fileno()).st_size
        if worker.report is not None:
            self.report_after = min(self.report_after, size)
        if worker.exitcode is not None:
            self.exit_after = min(self.exit_after, size)
