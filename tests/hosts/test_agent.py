"""The private parts of torchelastic that the agent relies on: a test fails when one changes or goes."""

from __future__ import annotations

import inspect
import socket
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed.elastic.agent.server.api as elastic
from torch.distributed.elastic.agent.server.api import SimpleElasticAgent, WorkerSpec

from nbddp.agent import agent as ours
from nbddp.agent.rendezvous import KernelRendezvous

OVERRIDDEN = ("_rendezvous", "_assign_worker_ranks", "_start_workers", "_monitor_workers", "_stop_workers", "_shutdown")


@pytest.fixture
def agent() -> ours.Agent:
    """One that has not met anybody yet."""
    pipe: Any = SimpleNamespace(wake=None, send=lambda *_: None)
    rendezvous = KernelRendezvous(pipe)
    return ours.Agent(WorkerSpec("default", 2, rendezvous, entrypoint=print), {}, pipe, rendezvous)


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
