"""What the notebook knows about a rank."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field

from nbddp.messages import Asks, Failure, Report
from nbddp.process.output import Output

_CONSEQUENCE = re.compile(
    r"[Cc]onnection (closed|reset) by peer|remote worker crashing|Broken pipe|Socket closed"
    r"|Connection refused, remote="  # gloo's: a rank that ended while they connected
    r"|ncclRemoteError|NCCL communicator was aborted|KeyboardInterrupt"
)
_EXIT_DELAY_S = 0.03  # an exit code arrives at most this long after the rank's death


@dataclass
class RankState:
    """One rank, as the run sees it.

    Attributes:
        begin: size of its output when the present order was given.
        called: an interrupt may be sent to it instead of a kill: its code has begun, or it's a session's rank.
        asks: its question, and when it came.
        out_of_memory: it was most likely the OOM killer that ended it.
    """

    number: int
    output: Output = field(default_factory=Output)
    begin: int = 0
    ready: bool = False
    pid: int = 0
    called: bool = False
    report: Report | None = None
    exitcode: int | None = None
    exited_at: float = 0.0
    out_of_memory: bool = False
    asks: tuple[Asks, float] | None = None

    def begin_order(self) -> None:
        """Forget the order before."""
        self.report, self.called, self.asks, self.begin = None, self.ready, None, self.output.size

    @property
    def alive(self) -> bool:
        return self.exitcode is None

    @property
    def over(self) -> bool:
        return self.report is not None or not self.alive

    @property
    def failed(self) -> bool:
        return not self.alive if self.report is None else self.failure is not None

    @property
    def state(self) -> str:
        """In a word, as a run's."""
        if self.failed:
            return "stopped"  # the first failure is the run's
        return "finished" if self.report is not None else "running" if self.called else "starting"

    @property
    def failure(self) -> Failure | None:
        """What it has reported, if that's a failure."""
        return self.report.failure if self.report is not None else None

    @property
    def is_consequence(self) -> bool:
        """Whether its failure only follows from another rank's end."""
        return self.failure is not None and bool(_CONSEQUENCE.search(f"{self.failure.kind}: {self.failure.text}"))

    @property
    def was_interrupted(self) -> bool:
        return self.failure is not None and self.failure.kind == "KeyboardInterrupt"

    @property
    def failed_at(self) -> float:
        return self.exited_at - _EXIT_DELAY_S if self.report is None else self.report.at

    def ended(self, exitcode: int) -> None:
        self.exitcode, self.exited_at = exitcode, time.monotonic()
