"""How a run is: the frozen ``Status``, and the ``Source`` that views read."""

from collections.abc import Callable
from dataclasses import dataclass

from nbddp.history.history import History


@dataclass(frozen=True)
class RankStatus:
    """One rank at one moment.

    Attributes:
        device: "cuda:0", "cpu".
        state: one of a run's.
        resident: memory of its process in bytes; None if it's not known.
        gpu: bytes in use on its GPU, by all processes, and in all; None if it's not known.
        host: its machine, if the run is on several.
        waits: "for input", or where the debugger has stopped it: "at line 3"; "" if it doesn't wait for the user.
    """

    rank: int
    device: str
    state: str
    resident: int | None = None
    gpu: tuple[int, int] | None = None
    host: str = ""
    waits: str = ""


@dataclass(frozen=True)
class Status:
    """A run at one moment.

    Attributes:
        state: "starting", "running", "finished", "failed", or "stopped".
        seconds: since its start; when it's over, how long it took.
        summary: "4 ranks · nccl".
        error: in a line; "" if there's none.
        failed_rank: the rank that the error names.
        remark: a line that's not an error.
        restarts, max_restarts: how often all ranks have been restarted, and how often they may be.
        hang: where the ranks are if none has made progress for a while: a summary in the first line, then each stack.
        blocking: a cell waits for it.
    """

    name: str
    state: str
    seconds: float
    summary: str = ""
    error: str = ""
    failed_rank: int | None = None
    remark: str = ""
    restarts: int = 0
    max_restarts: int = 0
    hang: str = ""
    blocking: bool = True
    ranks: tuple[RankStatus, ...] = ()

    @property
    def over(self) -> bool:
        return self.state not in ("starting", "running")


@dataclass(frozen=True)
class Source:
    """What views read of a run.

    Attributes:
        before: the metrics of an earlier run of the same function or cell.
        tail: returns the end of what a rank has printed: rank, characters.
        stop: asks it to stop.
    """

    history: History
    status: Callable[[], Status]
    before: History | None = None
    tail: Callable[[int, int], str] = lambda rank, chars: ""
    stop: Callable[[], None] = lambda: None
