"""Kernel side. The ranks of one attempt on several hosts: as ``launcher.Crew``, but over the hosts' pipes."""

from __future__ import annotations

import contextlib
import os
import queue
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from nbddp.errors import LaunchError
from nbddp.frames import Head
from nbddp.kernel.addresses import Meeting, meeting_of
from nbddp.kernel.crew import Ranks
from nbddp.kernel.far_worker import FarWorker
from nbddp.kernel.host import Host
from nbddp.kernel.hosts import Cluster
from nbddp.kernel.output import RankOutput
from nbddp.kernel.plan import Plan
from nbddp.payload import Packed

if TYPE_CHECKING:
    from nbddp.kernel.far import Far

_ENDED_S = 5.0  # for the hosts to say that everything there is gone
_ON_THE_WAY_S = 0.5
_NAP_S = 0.002


class FarCrew(Ranks):
    """All ranks of one attempt, on the hosts of a cluster that are there."""

    def __init__(self, plan: Plan, cluster: Cluster, site: Far, start_method: str) -> None:
        self.workers: list[FarWorker] = []
        self._plan = plan
        self._cluster = cluster
        self._site = site
        self._start_method = start_method
        self._hosts: list[Host] = []
        self._by_rank: dict[int, FarWorker] = {}
        self._ranks_of: dict[str, range] = {}
        # No Condition: an interrupt of the thread that wakes could leave its lock taken.
        self._news: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._refused: LaunchError | None = None
        self._ending = False
        self._told: set[str] = set()  # of this round, or on the way to it
        self._ended: set[str] = set()
        self._dismissed = 0
        self._dumps: dict[int, str] = {}
        self._answered: set[str] = set()
        self._ask = 0
        self._number = cluster.next_round()

    # ------------------------------------------------------------------ begin and end

    def __enter__(self) -> FarCrew:
        return self

    def __exit__(self, *exc_info: object) -> None:
        """End every rank on every host that knows of the round; one that does not answer is given up."""
        self._ending = True
        self._drop_payload()
        for host in self._waiting_for():
            host.send({"kind": "end"})
        deadline = time.monotonic() + _ENDED_S
        while self._waiting_for() and (left := deadline - time.monotonic()) > 0:
            self.watch(left)
        for host in self._waiting_for():
            host.give_up(f"it did not end its ranks within {_ENDED_S:.0f} s")
        for host in self._hosts:
            host.listener = None

    def _drop_payload(self) -> None:
        """Where it is still on its way, the round never begins."""
        for host in self._hosts:
            if host.drop_payload():
                self._ended.add(host.name)
                for rank in self._ranks_of[host.name]:
                    self._by_rank[rank].lose("the run ended before it began there")

    def _waiting_for(self) -> list[Host]:
        return [host for host in self._hosts if not host.lost and host.name in self._told - self._ended]

    def close(self) -> None:
        """Give up every fd."""
        for worker in self.workers:
            worker.close()

    def disown(self) -> None:
        """In a process forked from the kernel: the pipes to the hosts see to themselves."""

    def launch(self, packed: Packed, outputs: Sequence[RankOutput], restart_count: int) -> None:
        """Send the payload where it is not yet, and let the round begin on every host that is there.

        Raises:
            LaunchError, HostLost: too few hosts are left.
        """
        self._hosts = self._cluster.present(self._plan)
        meeting = meeting_of({host.name: host.facts for host in self._hosts})
        first = 0
        for host in self._hosts:
            ranks = range(first, first + dict(self._plan.shares)[host.name])
            first = ranks.stop
            self._ranks_of[host.name] = ranks
            for rank in ranks:
                self.workers.append(FarWorker(rank, host, outputs[rank]))
            self._site.layout = [*self._site.layout[: ranks.start], *((host.name, i) for i in range(len(ranks)))]
        self._by_rank = {worker.rank: worker for worker in self.workers}
        # The first host last: its store is told to the others, who must have heard of the round by then.
        for group_rank, host in reversed(list(enumerate(self._hosts))):
            host.listener = self._hear
            if host.lost:  # before it had one
                self._hear(host, {"kind": "lost"}, b"")
            begin = self._round(group_rank, host, meeting, restart_count)
            if host.has(packed):
                host.send(begin)
            else:
                host.send_payload(self._site.block, packed, [self._cluster.run_order(self._plan, packed, host), begin])
            self._told.add(host.name)

    def _round(self, group_rank: int, host: Host, meeting: Meeting, restart_count: int) -> Head:
        return {
            "kind": "round",
            "number": self._number,
            "run_id": f"nbddp-{os.getpid()}-{self._number}",
            "group_rank": group_rank,
            "group_size": len(self._hosts),
            "first_rank": self._ranks_of[host.name].start,
            "world_size": len(self.workers),
            "address": meeting.address[host.name],
            "interface": meeting.interface[host.name],
            "restart_count": restart_count,
            "start_method": self._start_method,
            "keep_children": self._plan.keep_children,
        }

    # ------------------------------------------------------------------ news in, on the hosts' threads

    def _hear(self, host: Host, head: Head, body: bytes) -> None:
        kind = head["kind"]
        if "rank" in head:
            worker = self._by_rank.get(head["rank"])
            if worker is not None and worker.rank in self._ranks_of[host.name]:
                worker.take(head, body, host.offset_s)
        elif kind == "store":
            for other in self._hosts:
                if other is not host:
                    other.send(head)
        elif kind == "started":
            for rank, pid in head["pids"].items():
                self._by_rank[int(rank)].pid = pid
        elif kind == "cannot start":
            self._refused = self._refused or LaunchError(f"{host.name} could not start its ranks: {head['why']}")
        elif kind == "ended":
            if head["round"] == self._number:
                self._ended.add(host.name)
        elif kind == "stacks":
            if head["ask"] == self._ask:
                self._dumps |= {int(rank): text for rank, text in head["dumps"].items()}
                self._answered.add(host.name)
        elif kind == "gauges":
            self._site.gauges.take(head)
        elif kind == "lost":
            for rank in self._ranks_of[host.name]:
                self._by_rank[rank].lose(host.lost + self._way_on())
        self.wake()

    def _way_on(self) -> str:
        """What a run that ends with one of its hosts has not been told to do; "" if nothing can be done."""
        others = len(self._hosts) - 1
        missing = ["max_restarts=1"] * (not self._plan.max_restarts)
        missing += [f"min_hosts={others}"] * (self._plan.min_hosts > others)
        return f"; with {', '.join(missing)} the others would have started again" if others and missing else ""

    # ------------------------------------------------------------------ what the run asks for

    def watch(self, timeout_s: float) -> None:
        """Wait for news, at most so long.

        Raises:
            LaunchError: a host could not start its ranks.
        """
        with contextlib.suppress(queue.Empty):
            self._news.get(timeout=max(0.0, timeout_s))
            while True:
                self._news.get_nowait()
        self._cluster.look_for_silence()
        if self._refused is not None and not self._ending:
            raise self._refused

    def wake(self) -> None:
        """End a :meth:`watch` under way in another thread."""
        self._news.put(None)

    def dismiss_reported(self) -> None:
        """Let the ranks leave that have reported."""
        reported = sum(worker.report is not None for worker in self.workers)
        if reported > self._dismissed:
            self._dismissed = reported
            self._tell({"kind": "leave"})

    def interrupt(self) -> None:
        """KeyboardInterrupt in every rank that is in the function; one still on its way there is killed."""
        self._ending = True
        self._drop_payload()
        self._tell({"kind": "interrupt"})

    def stacks(self, timeout_s: float) -> dict[int, str]:
        """faulthandler's dumps by rank, of those that answer in time."""
        self._ask += 1
        self._dumps, self._answered = {}, set()
        self._tell({"kind": "stacks", "ask": self._ask, "within_s": timeout_s})
        deadline = time.monotonic() + timeout_s + _ON_THE_WAY_S
        while not self._all_answered() and time.monotonic() < deadline:
            time.sleep(_NAP_S)
        return {rank: dump for rank, dump in self._dumps.items() if dump}

    def _all_answered(self) -> bool:
        return {host.name for host in self._hosts if not host.lost} <= self._answered

    def _tell(self, head: Head) -> None:
        for host in self._hosts:
            host.send(head)
