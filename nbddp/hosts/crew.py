"""The ranks of one attempt on several hosts; the counterpart of ``launch.crew``, over the hosts' control pipes."""

from __future__ import annotations

import contextlib
import os
import queue
import time
from collections.abc import Mapping, Sequence

from nbddp.errors import LaunchError
from nbddp.hosts import chain
from nbddp.hosts.addresses import Addresses, choose_addresses
from nbddp.hosts.cluster import Cluster
from nbddp.hosts.frames import Header
from nbddp.hosts.host import Host
from nbddp.hosts.network import Look
from nbddp.hosts.rank import RemoteRank
from nbddp.kernel.plan import Plan
from nbddp.launch.interface import CrewBase
from nbddp.launch.output import RankOutput
from nbddp.payload import Packed

_END_SILENCE_S = 5.0  # of a host that is to end its ranks
_END_TIMEOUT_S = 60.0  # for a host that sends something, but not that all its ranks are gone
_END_POLL_S = 0.5
_ROUND_TRIP_S = 0.5  # of a request and its answer
_POLL_S = 0.002


class RemoteGauges:
    """Memory of the ranks, as their hosts report it."""

    def __init__(self) -> None:
        self.processes: dict[int, int] = {}
        self.gpus: dict[int, tuple[int, int]] = {}

    def read(self, pids: Sequence[int]) -> None:
        """Do nothing: the hosts report without being asked."""

    def update(self, header: Header) -> None:
        """Store what one host has reported."""
        self.processes |= {int(rank): used for rank, used in header["processes"].items()}
        self.gpus |= {int(rank): (used, total) for rank, (used, total) in header["gpus"].items()}


class RemoteCrew(CrewBase):
    """All ranks of one attempt, on the hosts of a cluster that are not lost."""

    def __init__(
        self,
        plan: Plan,
        cluster: Cluster,
        start_method: str,
        block: int,
        layout: list[tuple[str, int]],
        gauges: RemoteGauges,
        saved: Mapping[str, tuple[str, int]],
    ) -> None:
        """
        Args:
            saved: snapshots of earlier attempts: the host of their rank 0 and the last step, by path.
        """
        self.workers: list[RemoteRank] = []
        self._plan = plan
        self._cluster = cluster
        self._block = block
        self._layout = layout
        self._gauges = gauges
        self._saved = saved
        self._start_method = start_method
        self._hosts: list[Host] = []
        self._by_rank: dict[int, RemoteRank] = {}
        self._ranks_of: dict[str, range] = {}
        # Not a Condition: an interrupt of the thread that calls wake() could leave its lock taken.
        self._wakeups: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._start_error: LaunchError | None = None
        self._ending = False
        self._begun: set[str] = set()  # hosts to which the order for this round was sent or queued
        self._ended: set[str] = set()
        self._dismissed = 0
        self._dumps: dict[int, str] = {}
        self._answered: set[str] = set()  # hosts that have sent their dumps
        self._asked = 0  # how often dumps were asked for
        self._round = cluster.next_round()
        self._look: Look | None = None  # at the network, before the ranks start
        self._addresses = Addresses({}, {})
        self._chain: chain.Chain | None = None  # if the newest payload goes from host to host

    # ------------------------------------------------------------------ begin and end

    def __enter__(self) -> RemoteCrew:
        return self

    def __exit__(self, *exc_info: object) -> None:
        """End every rank on every host where the round has begun; a host that does not answer is given up."""
        self._ending = True
        self._cancel_payload()
        for host in self._not_ended():
            host.send({"kind": "end"})
        asked_at = time.monotonic()
        while waiting := self._not_ended():
            self.watch(_END_POLL_S)
            self.give_up_silent(waiting, asked_at, "when it was to end its ranks")
        for host in self._hosts:
            host.listener = None

    def give_up_silent(self, waiting: Sequence[Host], asked_at: float, when: str) -> None:
        """Give up the hosts that do not answer what they were asked at this monotonic time, and send nothing else."""
        for host in waiting:
            if host.silent_s(asked_at) > max(_END_SILENCE_S, 2 * host.beat_s):
                host.give_up(f"it sent nothing for {host.silent_s(asked_at):.0f} s {when}")
            elif time.monotonic() - asked_at > _END_TIMEOUT_S:
                host.give_up(f"it did not answer within {_END_TIMEOUT_S:.0f} s {when}")

    def _cancel_payload(self) -> None:
        """Stop sending the payload; the round never begins on a host that has not received all of it."""
        for host in self._drop_payload():
            self._ended.add(host.name)
            for rank in self._ranks_of[host.name]:
                self._by_rank[rank].mark_lost("the run ended before it began there")

    def _drop_payload(self) -> list[Host]:
        """Stop sending the payload; returns the hosts that do not get the orders that need it, either."""
        waiting = self._chain.cancel() if self._chain is not None else []
        return [host for host in self._hosts if host.cancel_payload() or host in waiting]

    def _not_ended(self) -> list[Host]:
        return [host for host in self._hosts if not host.lost and host.name in self._begun - self._ended]

    def close(self) -> None:
        """Close all file descriptors."""
        for worker in self.workers:
            worker.close()

    def disown(self) -> None:
        """In a process forked from the notebook kernel: do nothing here, since the cluster closes its pipes itself."""

    def launch(self, packed: Packed, outputs: Sequence[RankOutput], restart_count: int) -> None:
        """Send the payload to the hosts that do not have it yet, and begin the round on all hosts.

        Raises:
            LaunchError, HostLost: too few hosts are left.
        """
        self._hosts = self._cluster.remaining_hosts(self._plan)
        addresses = self._addresses = choose_addresses({host.name: host.facts for host in self._hosts})
        first = 0
        for host in self._hosts:
            ranks = range(first, first + dict(self._plan.shares)[host.name])
            first = ranks.stop
            self._ranks_of[host.name] = ranks
            for rank in ranks:
                self.workers.append(RemoteRank(rank, host, outputs[rank]))
                if not {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"} & self._plan.env.keys():
                    self.workers[-1].interface = addresses.interface[host.name] or ""
            self._layout[ranks.start :] = [(host.name, i) for i in range(len(ranks))]
        self._by_rank = {worker.rank: worker for worker in self.workers}
        self._look = self._cluster.look_for(self._hosts, addresses)
        if missing := self._cluster.missing(self._ranks_of):
            outputs[0].note(f"{len(self._hosts)} of {len(self._plan.shares)} hosts take part ({missing})")
        orders = []
        # The first host comes last: the address of its store is sent to the others, where the round must have begun.
        for group_rank, host in reversed(list(enumerate(self._hosts))):
            host.listener = self._receive
            if host.lost:  # before it had a listener
                self._receive(host, {"kind": "lost"}, b"")
            begin = self._round_order(group_rank, host, addresses, restart_count, packed)
            orders.append((host, [begin] if host.has(packed) else [self._cluster.run_order(self._plan, host), begin]))
        self._send_payload([host for host in self._hosts if not host.has(packed)], (packed, self._block), orders)

    def _send_payload(
        self, lacking: Sequence[Host], data: tuple[Packed, int], orders: Sequence[tuple[Host, Sequence[Header]]]
    ) -> None:
        """Send the payload to the hosts that lack it, and then to all hosts their orders."""
        packed, block = data
        if chain.pays(lacking, packed, self._cluster.chain_from):
            self._chain = chain.Chain(lacking, self._addresses.address, data, orders, self._note)
            self._chain.begin()
            self._begun |= {host.name for host, _ in orders}
            return
        self._chain = None
        for host, then in orders:
            if host in lacking:
                host.send_payload(block, packed, then)
            else:
                for order in then:
                    host.send(order)
            self._begun.add(host.name)

    def _note(self, host: Host, text: str) -> None:
        """Add a line to the output of a host's first rank."""
        self._by_rank[self._ranks_of[host.name].start].output.note(f"{host.name}: {text}")

    def _round_order(
        self, group_rank: int, host: Host, addresses: Addresses, restart_count: int, packed: Packed
    ) -> Header:
        return {
            "kind": "round",
            "number": self._round,
            "run_id": f"nbddp-{os.getpid()}-{self._round}",
            "group_rank": group_rank,
            "group_size": len(self._hosts),
            "first_rank": self._ranks_of[host.name].start,
            "world_size": len(self.workers),
            "address": addresses.address[host.name],
            "interface": addresses.interface[host.name],
            "restart_count": restart_count,
            "look_token": self._look.token if self._look is not None else "",
            "start_method": self._start_method,
            "keep_children": self._plan.keep_children,
            "payload_nbytes": packed.nbytes,
            "lost_snapshots": [
                (path, saved_on, step)
                for path, (saved_on, step) in self._saved.items()
                if saved_on not in self._ranks_of
            ],
        }

    # ------------------------------------------------------------------ frames, on the hosts' threads

    def _receive(self, host: Host, header: Header, body: bytes) -> None:
        kind = header["kind"]
        if "rank" in header:
            worker = self._by_rank.get(header["rank"])
            if worker is not None and worker.rank in self._ranks_of[host.name]:
                worker.receive(header, body, host.offset_s)
        elif kind == "store":
            for other in self._hosts:
                if other is not host:
                    other.send(header)
        elif kind == "note":
            self._note(host, header["text"])
        elif kind in chain.KINDS:
            if self._chain is not None:
                self._chain.receive(host, header)
        elif kind == "started":
            for number, pid in header["pids"].items():
                started = self._by_rank[int(number)]
                started.pid, started.cwd, started.python = pid, header["cwd"], header["python"]
        elif kind in ("listens", "looked"):
            self._receive_look(host, header)
        elif kind == "cannot start":
            error = LaunchError(f"{host.name} could not start its ranks: {header['why']}")
            self._start_error = self._start_error or error
        elif kind == "ended":
            if header["round"] == self._round:
                self._ended.add(host.name)
        elif kind == "stacks":
            if header["ask"] == self._asked:
                self._dumps |= {int(rank): text for rank, text in header["dumps"].items()}
                self._answered.add(host.name)
        elif kind == "gauges":
            self._gauges.update(header)
        elif kind == "lost":
            for rank in self._ranks_of[host.name]:
                self._by_rank[rank].mark_lost(host.lost + self._restart_hint())
        self.wake()

    def _receive_look(self, host: Host, header: Header) -> None:
        assert self._look is not None
        if header["kind"] == "listens":
            self._look.listens(host, header["port"])
            return
        try:
            if self._look.has_looked(host, header):
                self._cluster.note_links(self._hosts, self._look.links)
        except LaunchError as error:
            self._start_error = self._start_error or error

    def _restart_hint(self) -> str:
        """Return the options with which the run would have outlived a lost host; "" if it has them, or one host."""
        others = len(self._hosts) - 1
        missing = ["max_restarts=1"] * (not self._plan.max_restarts)
        missing += [f"min_hosts={others}"] * (self._plan.min_hosts > others)
        return f"; with {', '.join(missing)} the others would have started again" if others and missing else ""

    # ------------------------------------------------------------------ for the run

    def watch(self, timeout_s: float) -> None:
        """Wait for frames of the hosts, at most ``timeout_s``.

        Raises:
            LaunchError: a host could not start its ranks.
        """
        with contextlib.suppress(queue.Empty):
            self._wakeups.get(timeout=max(0.0, timeout_s))
            while True:
                self._wakeups.get_nowait()
        self._cluster.check_heartbeats()
        if self._start_error is not None and not self._ending:
            raise self._start_error

    def hosts_back(self) -> list[str]:
        """Return the names of hosts that are there and do not take part: they were lost, and are back."""
        return self._cluster.back(self._plan, self._hosts) if self._hosts else []

    def wake(self) -> None:
        """End a :meth:`watch` in another thread."""
        self._wakeups.put(None)

    def dismiss_reported(self) -> None:
        """Let the ranks that have reported exit."""
        reported = sum(worker.report is not None for worker in self.workers)
        if reported > self._dismissed:
            self._dismissed = reported
            self._send_all({"kind": "leave"})

    def interrupt(self) -> None:
        """Raise KeyboardInterrupt in every rank that is in the function; kill those that have not reached it."""
        self._ending = True
        self._cancel_payload()
        self._send_all({"kind": "interrupt"})

    def stacks(self, timeout_s: float) -> dict[int, str]:
        """Return faulthandler's dumps by rank, of the ranks that answer in time."""
        self._asked += 1
        self._dumps, self._answered = {}, set()
        self._send_all({"kind": "stacks", "ask": self._asked, "within_s": timeout_s})
        deadline = time.monotonic() + timeout_s + _ROUND_TRIP_S
        while {host.name for host in self._hosts if not host.lost} - self._answered and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return {rank: dump for rank, dump in self._dumps.items() if dump}

    def _send_all(self, order: Header) -> None:
        for host in self._hosts:
            host.send(order)
