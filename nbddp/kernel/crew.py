"""Kernel side. Who starts the ranks, and where they are: what a run needs of them, whoever and wherever that is."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from nbddp import wire
from nbddp.kernel.output import RankOutput
from nbddp.payload import Packed, Pickled, Unpacked


class AnyGauges(Protocol):
    """Memory of the ranks, by rank, where known: resident bytes; bytes in use on the GPU and in all."""

    processes: dict[int, int]
    gpus: dict[int, tuple[int, int]]

    def read(self, pids: Sequence[int]) -> None:
        """Look at these processes, one per rank."""


class Site(Protocol):
    """Where a run's ranks are started, attempt after attempt: ``local.Local`` or ``far.Far``.

    Attributes:
        gauges: of its ranks.
        layout: host and local rank by rank, of the last attempt; empty on this machine alone.
    """

    layout: list[tuple[str, int]]

    @property
    def gauges(self) -> AnyGauges: ...

    def take(self, pickled: Pickled, wanted: Callable[[], bool]) -> None:
        """Copy the run's data to where the ranks of all attempts can have them, for as long as that is ``wanted``.

        Raises:
            OSError, LaunchError: there is no room for them.
        """

    def new_crew(self, start_method: str) -> AnyCrew:
        """For one attempt."""

    def may_go_on(self) -> bool:
        """Is enough left for another attempt?"""

    def close(self) -> None:
        """The run is over."""


class AnyWorker(Protocol):
    """One rank, as the kernel sees it: ``local_worker.Worker``, or ``far_worker.FarWorker`` on another host.

    Attributes:
        rank: its number.
        host: where it runs, by the name that the user gave; None on this machine alone.
        output: what it prints.
        ready: has it reported that device and group are up?
        called: has it reported that the function begins?
        report: its last word, or None.
        exitcode: as ``multiprocessing.Process.exitcode``; None while it lives.
        exited_at: monotonic time at which that was seen.
        orphaned: its fork server is gone, which would have told its exit code.
        out_of_memory: did the system kill it for want of memory?
        lost: why nothing more can be heard of its host; "" otherwise.
    """

    rank: int
    host: str | None
    output: RankOutput
    ready: bool
    called: bool
    report: wire.Finished | wire.Failed | wire.Exited | None
    exitcode: int | None
    exited_at: float | None
    orphaned: bool
    out_of_memory: bool
    lost: str

    @property
    def pid(self) -> int: ...

    @property
    def alive(self) -> bool: ...

    def read_metrics(self) -> bytes:
        """The metric records that have come, a part of them."""

    def unpack_result(self, nbytes: int, known: Sequence[Any]) -> Unpacked:
        """The object that it left in its result block."""


class Rank:
    """What the kernel knows of a rank, whoever starts it; its attributes are those of :class:`AnyWorker`."""

    def __init__(self, rank: int, output: RankOutput, host: str | None = None) -> None:
        self.rank = rank
        self.host = host
        self.output = output
        self.ready = False
        self.called = False
        self.report: wire.Finished | wire.Failed | wire.Exited | None = None
        self.exitcode: int | None = None
        self.exited_at: float | None = None
        self.orphaned = False
        self.out_of_memory = False
        self.lost = ""
        self._logged = 0  # bytes of metrics

    @property
    def alive(self) -> bool:
        return self.exitcode is None

    def signs_of_life(self) -> object:
        """Something that changes whenever it prints, logs, gets further, or ends."""
        printed = os.fstat(self.output.fileno()).st_size
        return printed, self._logged, self.ready, self.called, self.report is None, self.alive


class Ranks:
    """What can be said of the ranks of an attempt, whoever starts them."""

    workers: Sequence[Any]

    @property
    def alive(self) -> bool:
        """Does any live?"""
        return any(worker.alive for worker in self.workers)

    @property
    def ready(self) -> bool:
        """Have all reported that device and group are up?"""
        return all(worker.ready for worker in self.workers)

    def signs_of_life(self) -> object:
        """Something that changes whenever a rank prints, logs, gets further, or ends."""
        return [worker.signs_of_life() for worker in self.workers]


class AnyCrew(Protocol):
    """All ranks of one attempt. Leaving it as a context: every rank and all its children are gone."""

    @property
    def workers(self) -> Sequence[AnyWorker]: ...

    @property
    def alive(self) -> bool: ...

    @property
    def ready(self) -> bool: ...

    def __enter__(self) -> Any: ...

    def __exit__(self, *exc_info: object) -> None: ...

    def launch(self, packed: Packed, outputs: Sequence[RankOutput], restart_count: int) -> None:
        """Start all ranks with what their site has taken."""

    def watch(self, timeout_s: float) -> None:
        """Wait for news, at most so long, and take it in."""

    def wake(self) -> None:
        """End a :meth:`watch` under way in another thread."""

    def signs_of_life(self) -> object:
        """Something that changes whenever a rank prints, logs, gets further, or ends."""

    def dismiss_reported(self) -> None:
        """Let the ranks leave that have reported."""

    def interrupt(self) -> None:
        """KeyboardInterrupt in every rank that is in the function; one still on its way there is killed."""

    def stacks(self, timeout_s: float) -> dict[int, str]:
        """faulthandler's dumps by rank, of those that answer in time."""

    def close(self) -> None:
        """Give up every fd."""

    def disown(self) -> None:
        """In a process forked from the kernel: hold nothing of the ranks open."""
