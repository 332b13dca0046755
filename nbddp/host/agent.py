"""Host side. One run on this host: torchelastic's agent, whose rendezvous the kernel coordinates and whose workers
are a crew of ours.

``SimpleElasticAgent`` is the control loop inside torchrun: rendezvous, ranks, start, watch, start again. Its stock
rendezvous keeps its state as pickles in a store that anybody may write to, and counts restarts on each host for
itself; here the kernel says over its pipe when a round begins and ends, so round and count are the same everywhere.
The ranks come from the same fork server, by the same ``worker.entry``, as on one machine.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import queue
import socket
import sys
import time
from typing import TYPE_CHECKING, Any

import torch.distributed.elastic.agent.server.api as elastic
from torch.distributed import DistError, HashStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.api import RendezvousGracefulExitError

from nbddp import frames, wire
from nbddp.errors import LaunchError
from nbddp.frames import Head
from nbddp.kernel import forkserver, oom
from nbddp.kernel.gauges import Gauges
from nbddp.kernel.launcher import Crew, Worker
from nbddp.kernel.output import RankOutput, open_output
from nbddp.kernel.plan import Place, environment, threads_of
from nbddp.kernel.rendezvous import PREFIX
from nbddp.worker import entry

if TYPE_CHECKING:
    from nbddp.host.service import Pipe

_TICK_S = 0.05
_OPEN_S = datetime.timedelta(seconds=10)  # of the store's own client
_REACH_S = 15.0
_TRY_S = 0.5  # between two looks at what the kernel says
_AT_ONCE = 1e-6  # torchelastic sleeps between two looks; ours wait for news
_MOST_BACKLOG = 16 << 20  # bytes that the kernel has not read: what the ranks log then waits in their pipes
_READ_BYTES = 256 << 10


def run_agent(order: Head, pipe: Pipe) -> None:
    """Live one run, from the kernel's order until it says that the run is over."""
    # Events are named after the host, which would ask the DNS server for it at each.
    elastic._get_fq_hostname = socket.gethostname
    rounds = Rounds(pipe)
    spec = WorkerSpec(
        role="default",
        local_world_size=order["ranks"],
        entrypoint=entry.main,
        rdzv_handler=rounds,
        max_restarts=order["max_restarts"],
        monitor_interval=_AT_ONCE,
    )
    Agent(spec, order, pipe, rounds).run()


class Rounds(RendezvousHandler):
    """torchelastic's plug-in point: where the agents of one round meet. The kernel says when, and who is first."""

    def __init__(self, pipe: Pipe) -> None:
        self.round: Head = {}
        self.ended = False
        self.store: tuple[str, int] = ("", 0)
        self._pipe = pipe
        self._hosted: TCPStore | None = None

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for the next round to begin; the agent of group rank 0 hosts its store, on one address."""
        self._hosted = None  # each round has its own, so that nobody reads what a dead rank left
        self.round, self.ended = self._next("round"), False
        return self._meet()

    def give_up(self, error: Exception) -> None:
        """This round cannot begin here: tell the kernel, and wait until it has ended it."""
        if not isinstance(error, Ended):
            self._pipe.send({"kind": "cannot start", "why": f"its agent cannot meet the others: {_first_line(error)}"})
            self._next("end")
        self._pipe.send({"kind": "ended", "round": self.round["number"]})

    def _meet(self) -> RendezvousInfo:
        group_rank, size = self.round["group_rank"], self.round["group_size"]
        address = self.round["address"]
        store: Store
        if group_rank == 0:
            store = self._hosted = self._host(address, size)
            port = self._hosted.port
            self._pipe.send({"kind": "store", "address": address, "port": port})
        else:
            where = self._next("store")
            address, port = where["address"], where["port"]
            self._try_to_reach(address, port)
            store = HashStore()  # the agents have nothing to say to each other: the kernel tells them their ranks
        self.store = (address, port)
        return RendezvousInfo(store, group_rank, size, RendezvousStoreInfo(master_addr=address, master_port=port))

    def _try_to_reach(self, address: str, port: int) -> None:
        """For the ranks, which would try for minutes."""
        deadline = time.monotonic() + _REACH_S
        while True:
            try:
                socket.create_connection((address, port), timeout=_TRY_S).close()
                return
            except OSError as error:
                if time.monotonic() > deadline:
                    why = f"{address}, port {port}, cannot be reached from there; is there a firewall? ({error})"
                    raise OSError(why) from error
            self._raise_if_ended()
            time.sleep(_TICK_S)

    def _raise_if_ended(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                if self._pipe.orders.get_nowait()["kind"] == "end":
                    raise Ended

    def _host(self, address: str, size: int) -> TCPStore:
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            listener.bind((address, 0))
            listener.listen(1024)
            store = TCPStore(
                address,
                listener.getsockname()[1],
                size,
                is_master=True,
                wait_for_workers=False,
                master_listen_fd=listener.fileno(),
                timeout=_OPEN_S,
            )
        except BaseException:
            listener.close()
            raise
        listener.detach()  # the store closes it
        return store

    def _next(self, kind: str) -> Head:
        """The kernel's next order of this kind; raises as torchelastic's loop knows it when the run is over."""
        while True:
            order = self._pipe.orders.get()
            if order["kind"] == "over":
                raise RendezvousGracefulExitError("the run is over")
            if order["kind"] == kind:
                return order
            if order["kind"] == "end":
                raise Ended

    def num_nodes_waiting(self) -> int:
        """More than none is torchelastic's word for: this round is over, come to the next."""
        return int(self.ended)

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def shutdown(self) -> bool:
        return True

    def get_backend(self) -> str:
        return "nbddp"

    def get_run_id(self) -> str:
        return str(self.round.get("run_id", ""))


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


class Ended(Exception):
    """The kernel has ended a round before it began here."""


class Agent(SimpleElasticAgent):
    """torchelastic's control loop over a crew of ours; whatever happens to a rank is told to the kernel."""

    def __init__(self, spec: WorkerSpec, order: Head, pipe: Pipe, rounds: Rounds) -> None:
        super().__init__(spec)
        self._order = order
        self._pipe = pipe
        self._rounds = rounds
        self._around: contextlib.ExitStack | None = None
        self._crew: Crew | None = None
        self._told: dict[int, _Told] = {}
        self._more = False  # to tell, than there was time for
        self._gauges = Gauges(order["device"], {})

    # ------------------------------------------------------------------ what torchelastic asks for

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        while True:
            try:
                super()._rendezvous(worker_group)
                return
            except (Ended, DistError, OSError) as error:
                self._rounds.give_up(error)

    def _assign_worker_ranks(
        self, store: Store, group_rank: int, group_world_size: int, spec: WorkerSpec
    ) -> list[elastic.Worker]:
        """The kernel has decided them; torchelastic's own way waits in the store for every other agent."""
        first, size = self._rounds.round["first_rank"], self._rounds.round["world_size"]
        return [
            elastic.Worker(local, first + local, first + local, size, size) for local in range(spec.local_world_size)
        ]

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._oom_kills = oom.kills()
        self._around = contextlib.ExitStack()
        try:
            workers = self._start_crew(worker_group, self._around)
        except (LaunchError, OSError) as error:
            self._pipe.send({"kind": "cannot start", "why": str(error)})
            return {}
        self._pipe.send({"kind": "started", "pids": {worker.rank: worker.pid for worker in workers}})
        return {local_rank: worker.pid for local_rank, worker in enumerate(workers)}

    def _start_crew(self, worker_group: WorkerGroup, around: contextlib.ExitStack) -> list[Worker]:
        outputs = []
        for _ in worker_group.workers:
            outputs.append(RankOutput(open_output()))
            around.callback(outputs[-1].close)
        method = self._rounds.round["start_method"] if forkserver.available() else "spawn"
        temp_dir = around.enter_context(forkserver.folder_of_a_run()) if method == "forkserver" else ""
        crew = self._crew = Crew(method)
        around.callback(crew.close)
        around.callback(self._tell_of_all)
        around.enter_context(crew)
        jobs = [self._job(place, temp_dir) for place in self._places(worker_group)]
        self._gauges = Gauges(self._order["device"], jobs[0].environ)
        self._told = {job.rank: _Told() for job in jobs}
        self._pipe.wake = crew.wake
        crew.start(jobs, outputs, self._pipe.block, None, ())
        return crew.workers

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """One turn: orders in, news out. How the ranks are is for the kernel to judge."""
        if self._crew is not None:
            self._crew.watch(0.0 if self._more else _TICK_S)
        else:
            time.sleep(_TICK_S)  # it could not start: the kernel is about to end the round
        self._obey(self._crew)
        self._more = self._tell()
        return RunResult(state=WorkerState.HEALTHY)

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        """End every rank and all its children, and tell their last words."""
        self._pipe.wake = lambda: None
        if self._around is not None:
            around, self._around = self._around, None
            around.close()
            self._crew = None
            self._pipe.send({"kind": "ended", "round": self._rounds.round["number"]})

    def _shutdown(self, *args: Any, **kwargs: Any) -> None:
        self._stop_workers(self._worker_group)

    # ------------------------------------------------------------------ the ranks' jobs

    def _places(self, group: WorkerGroup) -> list[Place]:
        now = self._rounds.round
        return [
            Place(
                worker.global_rank,
                worker.local_rank,
                worker.world_size,
                len(group.workers),
                now["group_rank"],
                now["group_size"],
            )
            for worker in group.workers
        ]

    def _job(self, place: Place, temp_dir: str) -> wire.Job:
        order, now = self._order, self._rounds.round
        address, port = self._rounds.store
        env, gpus, count = order["env"], order["gpus"], now["restart_count"]
        threads = threads_of(place.local_world_size, {**os.environ, **env})
        environ = {
            **environment(order["device"], gpus, order["deterministic"], threads, env, now["interface"]),
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            **place.environ(now["run_id"], restart_count=count, max_restarts=order["max_restarts"]),
        }
        return wire.Job(
            run_name=order["name"],
            rank=place.rank,
            local_rank=place.local_rank,
            world_size=place.world_size,
            local_world_size=place.local_world_size,
            device=order["device"],
            backend=order["backend"],
            store_host=address,
            store_port=port,
            store_prefix=PREFIX,
            pg_timeout_s=order["pg_timeout_s"],
            seed=order["seed"],
            deterministic=order["deterministic"],
            threads=threads,
            environ=environ,
            sys_path=[*sys.path, *(path for path in order["sys_path"] if os.path.isdir(path) and path not in sys.path)],
            cwd=order["cwd"] if os.path.isdir(order["cwd"]) else os.path.expanduser("~"),
            temp_dir=temp_dir,
            argv=order["argv"],
            payload_nbytes=order["payload_nbytes"],
            pass_rank=False,
            restart_count=count,
        )

    # ------------------------------------------------------------------ orders in

    def _obey(self, crew: Crew | None) -> None:
        with contextlib.suppress(queue.Empty):
            while not self._rounds.ended:
                order = self._pipe.orders.get_nowait()
                if order["kind"] == "end":
                    self._rounds.ended = True
                elif crew is None:
                    continue
                elif order["kind"] == "interrupt":
                    crew.interrupt()
                elif order["kind"] == "leave":
                    crew.dismiss_reported()
                elif order["kind"] == "stacks":
                    self._pipe.send({"kind": "stacks", "ask": order["ask"], "dumps": crew.stacks(order["within_s"])})

    # ------------------------------------------------------------------ news out

    def _tell_of_all(self) -> None:
        """What the ranks wrote before they ended, whole."""
        while self._tell():
            pass

    def _tell(self) -> bool:
        """What is new of each rank. Returns whether there may be more."""
        if self._crew is None:
            return False
        if self._pipe.backlog > _MOST_BACKLOG:
            time.sleep(_TICK_S)
            return True
        more = [self._tell_of(worker, self._told[worker.rank]) for worker in self._crew.workers]
        if more:
            self._tell_of_memory(self._crew)
        return any(more)

    def _tell_of(self, worker: Worker, told: _Told) -> bool:
        rank = worker.rank
        if (worker.ready, worker.called) != told.state:
            told.state = (worker.ready, worker.called)
            self._pipe.send({"kind": "state", "rank": rank, "ready": worker.ready, "called": worker.called})
        # What it has written before what has become of it: the end of its output belongs to its error.
        output = os.pread(worker.output.fileno(), _READ_BYTES, told.printed)
        told.printed += len(output)
        if output:
            self._pipe.send({"kind": "output", "rank": rank}, output)
        metrics = worker.read_metrics()
        if metrics:
            self._pipe.send({"kind": "metrics", "rank": rank}, metrics)
        if output or metrics:
            return True
        if worker.report is not None and not told.report:
            told.report = True
            self._tell_report(worker, worker.report)
        if worker.exitcode is not None and not told.exit:
            told.exit = True
            self._pipe.send(
                {
                    "kind": "exit",
                    "rank": rank,
                    "exitcode": worker.exitcode,
                    "at": worker.exited_at,
                    "orphaned": worker.orphaned,
                    "out_of_memory": oom.kills() != self._oom_kills,
                }
            )
        return False

    def _tell_report(self, worker: Worker, report: wire.Finished | wire.Failed | wire.Exited) -> None:
        head = {"kind": "report", "rank": worker.rank, "type": type(report).__name__, **vars(report)}
        if not isinstance(report, wire.Exited):
            block = frames.BlockFrames(worker.result_fd, report.nbytes, kind="result", rank=worker.rank)
            self._pipe.send_all(block)
        self._pipe.send(head)

    def _tell_of_memory(self, crew: Crew) -> None:
        before = dict(self._gauges.processes), dict(self._gauges.gpus)
        self._gauges.read([worker.pid for worker in crew.workers])
        if before != (self._gauges.processes, self._gauges.gpus):
            first = crew.workers[0].rank
            processes = {first + local: used for local, used in self._gauges.processes.items()}
            gpus = {first + local: memory for local, memory in self._gauges.gpus.items()}
            self._pipe.send({"kind": "gauges", "processes": processes, "gpus": gpus})


class _Told:
    """What the kernel knows of a rank."""

    def __init__(self) -> None:
        self.printed = 0
        self.state = (False, False)
        self.report = False
        self.exit = False
