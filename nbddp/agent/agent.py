"""One run on this host: torchelastic's agent, with a rendezvous that the notebook kernel leads and our own workers.

``SimpleElasticAgent`` is the control loop inside torchrun: rendezvous, ranks, start, watch, start again. The ranks
come from the same fork server, by the same ``worker.entry``, as on one machine.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import queue
import socket
import sys
import time
from collections.abc import Sequence
from typing import Any

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
from nbddp.agent.calls import KINDS, Calls
from nbddp.agent.pipe import ControlPipe
from nbddp.agent.rendezvous import KernelRendezvous, RoundEnded
from nbddp.agent.reporter import Reporter
from nbddp.errors import LaunchError
from nbddp.forkserver import server as forkserver
from nbddp.hosts.frames import Header
from nbddp.launch.crew import LocalCrew
from nbddp.launch.devices import device_index
from nbddp.launch.environment import RankPosition, environment, threads_of
from nbddp.launch.gauges import LocalGauges
from nbddp.launch.output import RankOutput, open_output
from nbddp.launch.rank import LocalRank
from nbddp.launch.rendezvous import PREFIX
from nbddp.process_state import present
from nbddp.worker import entry

_POLL_S = 0.05
_NO_SLEEP_S = 1e-6  # torchelastic sleeps this long between two calls of _monitor_workers, which waits itself


def run_agent(order: Header, pipe: ControlPipe) -> None:
    """Run one run's agent, from the notebook kernel's order until the kernel ends the run."""
    _avoid_dns_lookups()
    rendezvous = KernelRendezvous(pipe)
    spec = WorkerSpec(
        role="default",
        local_world_size=order["ranks"],
        entrypoint=entry.main,
        rdzv_handler=rendezvous,
        max_restarts=order["max_restarts"],
        monitor_interval=_NO_SLEEP_S,
    )
    Agent(spec, order, pipe, rendezvous).run()


def _avoid_dns_lookups() -> None:
    """Replace the function by which torchelastic asks a DNS server for each event's host name (torch 2.6 to 2.15)."""
    if hasattr(elastic, "_get_fq_hostname"):
        elastic._get_fq_hostname = socket.gethostname


class Agent(SimpleElasticAgent):
    """torchelastic's control loop over a ``LocalCrew``, whose ranks are reported on to the notebook kernel."""

    def __init__(self, spec: WorkerSpec, order: Header, pipe: ControlPipe, rendezvous: KernelRendezvous) -> None:
        super().__init__(spec)
        self._order = order
        self._pipe = pipe
        self._rendezvous_handler = rendezvous
        self._open: contextlib.ExitStack | None = None
        self._crew: LocalCrew | None = None
        self._reporter: Reporter | None = None
        self._calls: Calls | None = None
        self._more_to_report = False

    @functools.cached_property
    def _places(self) -> tuple[str, list[str]]:
        """Return the ranks' working directory and the user's folders of modules; report those that are not used."""
        notes = []
        cwd, its_identity = self._order["cwd"]
        if why := folders.refusal(cwd, its_identity):
            home = os.path.expanduser("~")
            notes.append(f"the notebook's folder {cwd} {why}. The ranks here start in {home}")
            cwd = home
        found = []
        for folder, its_identity in self._order["folders"]:
            if not (why := folders.refusal(folder, its_identity)):
                found.append(folder)
            elif os.path.isdir(folder) and folder != self._order["cwd"][0]:
                notes.append(f"the notebook's folder {folder} {why}. No module is imported from it here")
        for note in notes:
            self._pipe.send({"kind": "note", "text": note})
        return cwd, found

    # ------------------------------------------------------------------ methods that torchelastic calls

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        while True:
            try:
                super()._rendezvous(worker_group)
                return
            except (RoundEnded, DistError, OSError) as error:
                self._rendezvous_handler.give_up(error)

    def _assign_worker_ranks(
        self, store: Store, group_rank: int, group_world_size: int, spec: WorkerSpec
    ) -> list[elastic.Worker]:
        """Return the ranks that the notebook kernel assigned; torchelastic's method would wait for all other agents."""
        first, size = self._rendezvous_handler.round["first_rank"], self._rendezvous_handler.round["world_size"]
        return [
            elastic.Worker(local, first + local, first + local, size, size) for local in range(spec.local_world_size)
        ]

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._open = contextlib.ExitStack()
        try:
            workers = self._start_crew(worker_group, self._open)
        except (LaunchError, OSError) as error:
            self._pipe.send({"kind": "cannot start", "why": str(error)})
            return {}
        self._report_start(workers)
        return {local_rank: worker.pid for local_rank, worker in enumerate(workers)}

    def _report_start(self, workers: Sequence[LocalRank]) -> None:
        pids = {worker.rank: worker.pid for worker in workers}
        self._pipe.send({"kind": "started", "pids": pids, "cwd": self._places[0], "python": sys.executable})

    def _start_crew(self, worker_group: WorkerGroup, stack: contextlib.ExitStack) -> list[LocalRank]:
        outputs = []
        for _ in worker_group.workers:
            outputs.append(RankOutput(open_output()))
            stack.callback(outputs[-1].close)
        method = self._rendezvous_handler.round["start_method"] if forkserver.available() else "spawn"
        if method == "forkserver" and not self._wait_for_fork_server():
            return []
        temp_dir = stack.enter_context(forkserver.run_folder()) if method == "forkserver" else ""
        jobs = [self._job(worker, temp_dir) for worker in worker_group.workers]
        crew = self._crew = LocalCrew(method, self._rendezvous_handler.round["keep_children"])
        gauges = LocalGauges(self._order["device"], jobs[0].environ, self._order["gpus"])
        reporter = self._reporter = Reporter(crew, self._pipe, gauges)
        self._calls = Calls(crew, reporter, lambda *which: self._job_again(worker_group, temp_dir, *which))
        stack.callback(self._calls.close)
        stack.callback(crew.close)
        stack.callback(reporter.report_all)
        stack.enter_context(crew)
        stack.callback(reporter.drop_results)
        self._pipe.wake = crew.wake
        crew.start(jobs, outputs, self._pipe.block, None, ())
        return crew.workers

    def _wait_for_fork_server(self) -> bool:
        """Wait until it has imported torch, which may take minutes. Returns False if the round ends first."""
        server = forkserver.running()
        while not self._rendezvous_handler.ended:
            if server.is_ready(_POLL_S):
                return True
            self._carry_out_orders(None)
        return False

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Carry out orders, then report. Always HEALTHY: only the notebook kernel decides when a round has failed."""
        if self._crew is None or self._reporter is None:
            time.sleep(_POLL_S)  # the ranks could not be started, and the notebook kernel is about to end the round
            self._carry_out_orders(None)
        else:
            self._crew.watch(0.0 if self._more_to_report else _POLL_S)
            self._carry_out_orders(self._crew)
            self._more_to_report = self._reporter.report()
        return RunResult(state=WorkerState.HEALTHY)

    def _stop_workers(self, worker_group: WorkerGroup, is_restart: bool = False) -> None:  # the second: torch 2.6, 2.7
        """End every rank and all its children, and report what they wrote before."""
        self._pipe.wake = lambda: None
        if self._open is not None:
            resources, self._open = self._open, None
            resources.close()
            self._crew = self._reporter = self._calls = None  # which refers to this agent, and so to the store
            self._pipe.send_first({"kind": "ended", "round": self._rendezvous_handler.round["number"]})

    def _shutdown(self, *args: Any, **kwargs: Any) -> None:
        self._stop_workers(self._worker_group)

    # ------------------------------------------------------------------ the ranks' jobs

    def _job_again(
        self, group: WorkerGroup, temp_dir: str, local_rank: int, number: int, payload_nbytes: int
    ) -> wire.Job:
        """Return the job of a rank of a session that is started again, in the process group of this number."""
        job = self._job(group.workers[local_rank], temp_dir)
        return dataclasses.replace(job, group=number, payload_nbytes=payload_nbytes)

    def _job(self, worker: elastic.Worker, temp_dir: str) -> wire.Job:
        order, this_round = self._order, self._rendezvous_handler.round
        group_rank, group_size = this_round["group_rank"], this_round["group_size"]
        rank, local_rank, world_size = worker.global_rank, worker.local_rank, worker.world_size
        position = RankPosition(rank, local_rank, world_size, order["ranks"], group_rank, group_size)
        address, port = self._rendezvous_handler.store
        env, gpus, count = order["env"], order["gpus"], this_round["restart_count"]
        threads = threads_of(order["ranks"], {**os.environ, **env})
        environ = {
            **environment(order["device"], gpus, order["deterministic"], threads, env, this_round["interface"]),
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            **position.environ(this_round["run_id"], restart_count=count, max_restarts=order["max_restarts"]),
        }
        return wire.Job(
            run_name=order["name"],
            rank=rank,
            local_rank=local_rank,
            world_size=world_size,
            local_world_size=order["ranks"],
            device=order["device"],
            device_index=device_index(local_rank, gpus),
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
            sys_path=folders.first(self._places[1], sys.path),
            cwd=self._places[0],
            temp_dir=temp_dir,
            argv=order["argv"],
            payload_nbytes=this_round["payload_nbytes"],
            pass_rank=False,
            restart_count=count,
            attended=order["attended"],
            post_mortem=order["post_mortem"],
            lost_snapshots=tuple((path, host, step) for path, host, step in this_round["lost_snapshots"]),
            listen=order["listen"],
            stays=order["stays"],
        )

    # ------------------------------------------------------------------ orders

    def _carry_out_orders(self, crew: LocalCrew | None) -> None:
        with contextlib.suppress(queue.Empty):
            while not self._rendezvous_handler.ended:
                order = self._pipe.orders.get_nowait()
                if order["kind"] == "end":
                    self._rendezvous_handler.ended = True
                    if self._reporter is not None:
                        self._reporter.skip_to_last_lines()
                elif crew is None or self._reporter is None:
                    continue
                elif order["kind"] == "interrupt":
                    self._reporter.drop_results()
                    crew.interrupt()
                elif order["kind"] == "leave":
                    crew.dismiss_reported()
                elif order["kind"] in KINDS:
                    self._carry_out_call(crew, order)
                elif order["kind"] in _DEBUGGER:
                    _tell_debugger(crew, order)
                elif order["kind"] == "stacks":
                    dumps = crew.stacks(order["within_s"])
                    self._pipe.send_first({"kind": "stacks", "ask": order["ask"], "dumps": dumps})

    def _carry_out_call(self, crew: LocalCrew, order: Header) -> None:
        """Carry out an order of a session."""
        assert self._calls is not None
        try:
            self._calls.carry_out(order, self._pipe.block, self._pipe.send_first)
        except (LaunchError, OSError) as error:
            self._pipe.send({"kind": "cannot start", "why": str(error)})
        if order.get("again"):
            self._report_start(crew.workers)


_DEBUGGER: dict[str, Any] = {"look": wire.Look(), "hold timeouts": wire.HoldTimeouts(), "answer": None}


def _tell_debugger(crew: LocalCrew, order: Header) -> None:
    for worker in crew.workers:
        if worker.rank == order["rank"]:
            if order["kind"] == "answer":
                worker.answer(order["line"])
            else:
                worker.tell_debugger(_DEBUGGER[order["kind"]])
