"""What the notebook knows about a rank."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from nbddp import payload
from nbddp.kernel.output import Output
from nbddp.messages import Failure, Report

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
        printed_before: size of its output when the present order was given.
        interruptible: SIGINT stops its order; otherwise only a kill does, since it hasn't begun the user's function. A
            session's rank is from its first order on.
        prompt: what it asks in ``input()`` or a debugger, since ``asked_at``; None if it asks nothing.
        hides: the answer isn't to be seen.
        paused_at: the line of that debugger.
        out_of_memory: it was most likely the OOM killer that ended it.
        host: its machine, if that's not the notebook's.
        lost: why that can't be reached any more; "" as long as it can.
    """

    number: int
    output: Output = field(default_factory=Output)
    printed_before: int = 0
    ready: bool = False
    pid: int = 0
    interruptible: bool = False
    report: Report | None = None
    exitcode: int | None = None
    exited_at: float = 0.0
    out_of_memory: bool = False
    prompt: str | None = None
    hides: bool = False
    paused_at: int = 0
    asked_at: float = 0.0
    host: str = ""
    lost: str = ""

    def begin_order(self) -> None:
        """Forget the order before."""
        self.report = self.prompt = None
        self.interruptible, self.printed_before = self.ready, self.output.begin_order()

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
        return "finished" if self.report is not None else "running" if self.interruptible else "starting"

    @property
    def failure(self) -> Failure | None:
        """What it has reported, if that's a failure."""
        return self.report.failure if self.report is not None else None

    @property
    def is_consequence(self) -> bool:
        """Whether its failure only follows from another rank's end."""
        return self.failure is not None and bool(_CONSEQUENCE.search(f"{self.failure.kind}: {self.failure.text}"))

    @property
    def raised(self) -> str:
        """The class of what it has raised, by name; "" if it hasn't."""
        return self.failure.kind if self.failure is not None else ""

    @property
    def failed_at(self) -> float:
        return self.exited_at - _EXIT_DELAY_S if self.report is None else self.report.at

    def value(self, definitions: Sequence[Any] = ()) -> Any:
        """Unpack what it has reported, once: a value or an exception. Raises what unpickling raises.

        Args:
            definitions: all that the ranks have been sent, to which it may refer; see payload.
        """
        if self.report is None or self.report.block is None:
            return None
        with self.report.block:
            return payload.unpack(self.report.block, known=definitions).value

    def close(self) -> None:
        """Let go of what it has reported, if nobody has unpacked it."""
        if self.report is not None and self.report.block is not None:
            self.report.block.close()
