"""Host side. One run on this host: torchelastic's agent, whose rendezvous the kernel coordinates and whose workers
are a crew of ours.

``SimpleElasticAgent`` is the control loop inside torchrun: rendezvous, ranks, start, watch, start again. The ranks
come from the same fork server, by the same ``worker.entry``, as on one machine.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import sys
import time
from typing import TYPE_CHECKING, Any

import torch.distributed.elastic.agent.server.api as elastic
from torch.distributed import DistError, Store  # type: ignore[attr-defined]
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)

from nbddp import folders, wire
from nbddp.errors import LaunchError
from nbddp.frames import Head
from nbddp.host.news import News
from nbddp.host.rounds import Ended, Rounds
from nbddp.kernel import forkserver
from nbddp.kernel.environment import Place, environment, threads_of
from nbddp.kernel.gauges import Gauges
from nbddp.kernel.launcher import Crew
from nbddp.kernel.local_worker import Worker
from nbddp.kernel.output import RankOutput, open_output
from nbddp.kernel.rendezvous import PREFIX
from nbddp.process_state import present
from nbddp.worker import entry

if TYPE_CHECKING:
    from nbddp.host.service import Pipe

_TICK_S = 0.05
_AT_ONCE = 1e-6  # torchelastic sleeps between two looks; ours wait for news


def run_agent(order: Head, pipe: Pipe) -> None:
    """Live one run, from the kernel's order until it says that the run is over."""
    _leave_dns_alone()
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


def _leave_dns_alone() -> None:
    """torchelastic names each of its events after the host, and asks the DNS server for that (torch 2.6 to 2.13)."""
    if hasattr(elastic, "_get_fq_hostname"):
        elastic._get_fq_hostname = socket.gethostname


class Agent(SimpleElasticAgent):
    """torchelastic's control loop over a crew of ours; whatever happens to a rank is told to the kernel."""

    def __init__(self, spec: WorkerSpec, order: Head, pipe: Pipe, rounds: Rounds) -> None:
        super().__init__(spec)
        self._order = order
        self._pipe = pipe
        self._rounds = rounds
        self._around: contextlib.ExitStack | None = None
        self._crew: Crew | None = None
        self._news: News | None = None
        self._more = False  # to tell, than there was time for

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
        jobs = [self._job(place, temp_dir) for place in self._places(worker_group)]
        crew = self._crew = Crew(method)
        news = self._news = News(crew, self._pipe, Gauges(self._order["device"], jobs[0].environ))
        around.callback(crew.close)
        around.callback(news.tell_all)
        around.enter_context(crew)
        around.callback(news.drop_results)
        self._pipe.wake = crew.wake
        crew.start(jobs, outputs, self._pipe.block, None, ())
        return crew.workers

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """One turn: orders in, news out. How the ranks are is for the kernel to judge."""
        if self._crew is None or self._news is None:
            time.sleep(_TICK_S)  # it could not start: the kernel is about to end the round
            self._obey(None)
        else:
            self._crew.watch(0.0 if self._more else _TICK_S)
            self._obey(self._crew)
            self._more = self._news.tell()
        return RunResult(state=WorkerState.HEALTHY)

    def _stop_workers(self, worker_group: WorkerGroup, is_restart: bool = False) -> None:  # the second: torch 2.6, 2.7
        """End every rank and all its children, and tell their last words."""
        self._pipe.wake = lambda: None
        if self._around is not None:
            around, self._around = self._around, None
            around.close()
            self._crew = self._news = None
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
            process_state=present(),
            sys_path=folders.first(order["folders"], sys.path),
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
                elif crew is None or self._news is None:
                    continue
                elif order["kind"] == "interrupt":
                    self._news.drop_results()
                    crew.interrupt()
                elif order["kind"] == "leave":
                    crew.dismiss_reported()
                elif order["kind"] == "stacks":
                    dumps = crew.stacks(order["within_s"])
                    self._pipe.send_first({"kind": "stacks", "ask": order["ask"], "dumps": dumps})
