"""The agent: the private parts of torchelastic that it relies on, of which one may change or go, and its pipe."""

from __future__ import annotations

import inspect
import os
import select
import socket
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed.elastic.agent.server.api as elastic
from torch.distributed.elastic.agent.server.api import SimpleElasticAgent, WorkerSpec

from nbddp.agent import agent as ours
from nbddp.agent import pipe
from nbddp.agent.rendezvous import KernelRendezvous
from nbddp.hosts import frames

OVERRIDDEN = ("_rendezvous", "_assign_worker_ranks", "_start_workers", "_monitor_workers", "_stop_workers", "_shutdown")


@pytest.fixture
def agent() -> ours.Agent:
    """One that has not met anybody yet."""
    answers: Any = SimpleNamespace(wake=None, send=lambda *_: None)
    rendezvous = KernelRendezvous(answers)
    return ours.Agent(WorkerSpec("default", 2, rendezvous, entrypoint=print), {}, answers, rendezvous)


@pytest.mark.parametrize("name", OVERRIDDEN)
def test_overridden_methods_accept_the_parameters_of_torchelastic(name: str) -> None:
    theirs = inspect.signature(getattr(SimpleElasticAgent, name)).parameters
    mine = inspect.signature(getattr(ours.Agent, name))
    mine.bind(*theirs)
    first, *others = theirs
    mine.bind(first, **dict.fromkeys(others))


@pytest.mark.parametrize("said", [{}, {"is_restart": True}], ids=["torch 2.8", "torch 2.6"])
def test_a_restart_with_or_without_is_restart_is_accepted(agent: ours.Agent, said: dict[str, bool]) -> None:
    agent._stop_workers(agent.get_worker_group(), **said)


def test_constructing_an_event_asks_no_dns_server(agent: ours.Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(socket, "getfqdn", lambda name="": asked.append(name) or name)
    agent._construct_event("STARTED", elastic.EventSource.AGENT)
    assert asked, "torch does not ask any more: _avoid_dns_lookups can go"
    monkeypatch.setattr(elastic, "_get_fq_hostname", elastic._get_fq_hostname)  # as it was, afterwards
    ours._avoid_dns_lookups()
    asked.clear()
    agent._construct_event("STARTED", elastic.EventSource.AGENT)
    assert not asked


def test_after_a_suspension_of_the_whole_machine_the_agent_waits_for_the_notebooks_next_beat(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A hypervisor stops agent and notebook at once, and goes on when all time limits are over."""
    orders, notebooks_end = os.pipe()
    read_end, answers = os.pipe()
    exits: list[int] = []
    waits: list[float] = []
    wait = select.select

    def suspended(readable: list[int], _w: object, _x: object, timeout_s: float) -> Any:
        waits.append(timeout_s)
        if len(waits) > 1:
            return wait(readable, [], [], timeout_s)
        threading.Timer(0.1, os.write, (notebooks_end, b"".join(frames.encode({"kind": "round"})))).start()
        return [], [], []

    monkeypatch.setattr(pipe, "select", SimpleNamespace(select=suspended))
    monkeypatch.setattr(pipe, "os", SimpleNamespace(**{**vars(os), "_exit": exits.append}))
    control = pipe.ControlPipe(orders, answers)
    try:
        assert control.orders.get(timeout=20) == {"kind": "round"}
        assert not exits
        assert sum(waits[:2]) == pipe._FIRST_TIMEOUT_S
    finally:
        os.close(notebooks_end)
        while not exits:
            time.sleep(0.01)
        control.close()
        for fd in (orders, read_end, answers):
            os.close(fd)
