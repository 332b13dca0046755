"""The interface between a run and the machines that start its ranks: this machine, or several hosts."""

from __future__ import annotations

import collections
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, Union

from nbddp import wire
from nbddp.latch import StayingThread
from nbddp.launch.output import RankOutput
from nbddp.payload import Packed, Pickled, Unpacked


class Cluster(Protocol):
    """Hosts that stay logged in: ``nbddp.cluster(...)``."""

    hosts: list[str]

    def devices(self) -> dict[str, Mapping[str, int]]:
        """Return the number of devices by type for each host."""


Hosts = Union[Sequence[str], str, Cluster, None]  # of ``run(hosts=...)``


class Gauges(Protocol):
    """Memory of the ranks, by rank, where known: resident bytes; bytes in use and total bytes of the GPU."""

    processes: dict[int, int]
    gpus: dict[int, tuple[int, int]]

    def read(self, pids: Sequence[int]) -> None:
        """Read the memory of these processes, one per rank."""


class Site(Protocol):
    """The machines on which a run's ranks are started, for all its attempts: this machine, or several hosts.

    Attributes:
        gauges: the memory of the ranks.
        layout: the host and local rank of each rank in the last attempt; empty on this machine alone.
        thread: does the run's work, and stays; None: the run has a thread of its own.
    """

    layout: list[tuple[str, int]]
    thread: StayingThread | None

    @property
    def gauges(self) -> Gauges: ...

    def copy_data(self, pickled: Pickled, keep_going: Callable[[], bool]) -> None:
        """Copy the run's data to where the ranks of all attempts find it; stop when ``keep_going()`` is false.

        Raises:
            OSError, LaunchError: there is not enough memory.
        """

    def open_output(self) -> int:
        """Open a file for the output of one rank, as :func:`nbddp.launch.output.open_output`."""

    def new_crew(self, start_method: str) -> Crew:
        """Return a crew for one attempt."""

    def remember_snapshots(self, saved: Mapping[str, int]) -> None:
        """Remember what rank 0 of the last attempt has saved: the last step, by path."""

    def waits_for(self, *, started: bool) -> str:
        """Return what the run waits for, in words: imports, or data on their way to or from a host; "" for nothing.

        Args:
            started: a rank has been started.
        """

    def missing(self) -> str:
        """Return which hosts the run does without, in words; "" for none."""

    def slow_links(self) -> str:
        """Return which connections between hosts are far slower than the others, in words; "" for none."""

    def can_restart(self) -> bool:
        """Return whether enough hosts are left for another attempt."""

    def close(self) -> None:
        """End the run here: free its data."""


class Home(Site, Protocol):
    """The machines on which the ranks of a session stay."""

    def for_call(self) -> CallSite:
        """Return where the next call finds its data."""

    def staying_crew(self, start_method: str, block: int) -> StayingCrew:
        """Return the session's crew; ``block`` is the first call's payload."""


class CallSite(Protocol):
    """Where one call of a session finds its data.

    Attributes:
        block: file descriptor of the block that holds them; -1 before :meth:`copy_data`.
    """

    block: int

    @property
    def gauges(self) -> Gauges: ...

    def copy_data(self, pickled: Pickled, keep_going: Callable[[], bool]) -> None:
        """Copy the data to where the ranks find them, as :meth:`Site.copy_data`."""

    def waits_for(self, *, started: bool) -> str:
        """Return what the run waits for, as :meth:`Site.waits_for`."""

    def close(self) -> None:
        """Free the data."""


class Rank(Protocol):
    """One rank, as the kernel sees it: on this machine or on another host.

    Attributes:
        rank: its number.
        host: the rank's host, by the name that the user gave; None on this machine alone.
        output: the rank's output.
        ready: the rank has reported that device and process group are ready.
        called: the function has been called.
        report: the rank's last message, or None.
        exitcode: as ``multiprocessing.Process.exitcode``; None while the rank lives.
        exited_at: monotonic time at which the exit was noticed.
        orphaned: the rank's fork server, which would have reported the exit code, has ended.
        out_of_memory: the OOM killer ended the rank.
        lost: why the connection to the rank's host was lost; "" otherwise.
        said: by the rank's debugger, oldest first; the reader takes it away.
        cwd, python: on another host, the directory where the rank starts and its interpreter; "" on this machine.
        interface: on another host, the network interface for gloo and NCCL.
    """

    rank: int
    host: str | None
    output: RankOutput
    ready: bool
    report: wire.Report | None
    exitcode: int | None
    exited_at: float | None
    orphaned: bool
    out_of_memory: bool
    lost: str
    cwd: str
    python: str
    interface: str
    said: collections.deque[wire.Asks | wire.GoesOn]

    @property
    def pid(self) -> int: ...

    @property
    def alive(self) -> bool: ...

    @property
    def called(self) -> bool: ...

    def read_metrics(self) -> bytes:
        """Return a part of the metric records that have arrived."""

    def unpack_result(self, nbytes: int, known: Sequence[Any]) -> Unpacked:
        """Unpack the object in its result block."""

    def answer(self, line: str | None) -> None:
        """Answer the debugger of the rank, which has asked; None: nobody can."""

    def tell_debugger(self, message: wire.Look | wire.HoldTimeouts) -> None:
        """Send a message to the rank while it is in its function."""


class RankBase:
    """The state of a rank on any machine; the attributes are those of :class:`Rank`."""

    def __init__(self, rank: int, output: RankOutput, host: str | None = None) -> None:
        self.rank = rank
        self.host = host
        self.output = output
        self.ready = False
        self.report: wire.Report | None = None
        self.exitcode: int | None = None
        self.exited_at: float | None = None
        self.orphaned = False
        self.out_of_memory = False
        self.lost = ""
        self.cwd = self.python = self.interface = ""
        self.said: collections.deque[wire.Asks | wire.GoesOn] = collections.deque()
        self._logged = 0  # bytes of metrics

    @property
    def alive(self) -> bool:
        return self.exitcode is None

    @property
    def called(self) -> bool:
        raise NotImplementedError

    def progress(self) -> object:
        """Return a value that changes whenever the rank prints, logs, reaches its next phase, or ends."""
        printed = os.fstat(self.output.fileno()).st_size
        return printed, self._logged, self.ready, self.called, self.report is None, self.alive


class StayingRank(Rank, Protocol):
    """A rank of a session.

    Attributes:
        regrouped: its answer to :meth:`regroup`, or None.
    """

    regrouped: wire.Regrouped | None

    def free(self) -> None:
        """Release the rank from a collective whose other ranks will not come."""

    def interrupt(self) -> None:
        """Raise KeyboardInterrupt in its main thread."""

    def regroup(self, number: int) -> None:
        """Have the rank join the process group of this number; ``regrouped`` is its answer."""

    def dismiss(self) -> None:
        """Let the rank exit."""

    def kill(self) -> None:
        """End the rank and its children at once."""

    def end(self) -> None:
        """End what is left of the rank and its children."""

    def close_call(self) -> None:
        """Close what belongs to a call that is over."""


class CrewBase:
    """The common part of all crews, on this machine or on several hosts."""

    workers: Sequence[Any]

    @property
    def alive(self) -> bool:
        """Whether any rank is alive."""
        return any(worker.alive for worker in self.workers)

    def hosts_back(self) -> list[str]:
        """Return the names of hosts that are there and do not take part; none on this machine alone."""
        return []

    @property
    def ready(self) -> bool:
        """Whether all ranks have reported that device and process group are ready."""
        return all(worker.ready for worker in self.workers)

    def progress(self) -> object:
        """Return a value that changes whenever a rank prints, logs, reaches its next phase, or ends."""
        return [worker.progress() for worker in self.workers]


class Crew(Protocol):
    """All ranks of one attempt. On leaving the context every rank and all its children have ended."""

    @property
    def workers(self) -> Sequence[Rank]: ...

    @property
    def alive(self) -> bool: ...

    @property
    def ready(self) -> bool: ...

    def hosts_back(self) -> list[str]:
        """Return the names of hosts that are there and do not take part in this attempt."""

    def __enter__(self) -> Any: ...

    def __exit__(self, *exc_info: object) -> None: ...

    def launch(self, packed: Packed, outputs: Sequence[RankOutput], restart_count: int) -> None:
        """Start all ranks; their site has copied the data."""

    def watch(self, timeout_s: float) -> None:
        """Wait until something happens, at most ``timeout_s``, and handle it."""

    def wake(self) -> None:
        """End a :meth:`watch` under way in another thread."""

    def progress(self) -> object:
        """Return a value that changes whenever a rank prints, logs, reaches its next phase, or ends."""

    def dismiss_reported(self) -> None:
        """Let the ranks that have reported exit."""

    def interrupt(self) -> None:
        """Raise KeyboardInterrupt in every rank that is in the function; kill those that have not reached it."""

    def stacks(self, timeout_s: float) -> dict[int, str]:
        """Return faulthandler's dumps by rank, of the ranks that answer in time."""

    def close(self) -> None:
        """Close every file descriptor."""

    def disown(self) -> None:
        """In a process forked from the kernel: hold nothing of the ranks open."""


class StayingCrew(Crew, Protocol):
    """The ranks of a session, which take one call after the other.

    Attributes:
        returns_within_s: how long ranks that were asked to leave a call have time.
    """

    returns_within_s: float

    @property
    def workers(self) -> Sequence[StayingRank]: ...

    def begin_call(
        self,
        call: wire.NextCall,
        data: tuple[Packed, int],
        outputs: Sequence[RankOutput],
        ranks: Sequence[int],
        again: Sequence[int],
        group: int,
    ) -> None:
        """Begin a call.

        Args:
            data: the call's payload, and the file descriptor of its block.
            outputs: of all ranks of the session.
            ranks: on these, which have reported.
            again: ranks that have ended, and are started again with this call.
            group: the number of the process group that these join.
        """

    def open_output(self) -> int:
        """Open a file for the output of one rank in the next call."""

    def cancel_upload(self) -> None:
        """Send no more of the payload: where not all of it has arrived, the call does not begin."""

    def end_call(self) -> None:
        """Wait until all that the ranks have printed and logged in this call has arrived."""
