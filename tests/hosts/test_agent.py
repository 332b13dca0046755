"""What the agent takes from torchelastic without being promised it: gone, or changed, it is a test that fails."""

from __future__ import annotations

import inspect
import socket
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed.elastic.agent.server.api as elastic
from torch.distributed.elastic.agent.server.api import SimpleElasticAgent, WorkerSpec

from nbddp.host import agent as ours
from nbddp.host.rounds import Rounds

OVERRIDDEN = ("_rendezvous", "_assign_worker_ranks", "_start_workers", "_monitor_workers", "_stop_workers", "_shutdown")


@pytest.fixture
def agent() -> ours.Agent:
    """One that has not met anybody yet."""
    pipe: Any = SimpleNamespace(wake=None, send=lambda *_: None)
    rounds = Rounds(pipe)
    return ours.Agent(WorkerSpec("default", 2, rounds, entrypoint=print), {}, pipe, rounds)


@pytest.mark.parametrize("name", OVERRIDDEN)
def test_what_the_agent_overrides_is_called_otherwise(name: str) -> None:
    theirs = inspect.signature(getattr(SimpleElasticAgent, name)).parameters
    mine = inspect.signature(getattr(ours.Agent, name))
    mine.bind(*theirs)
    first, *others = theirs
    mine.bind(first, **dict.fromkeys(others))


@pytest.mark.parametrize("said", [{}, {"is_restart": True}], ids=["torch 2.8", "torch 2.6"])
def test_a_restart_ends_the_agent(agent: ours.Agent, said: dict[str, bool]) -> None:
    agent._stop_workers(agent.get_worker_group(), **said)


def test_an_event_asks_the_dns_server(agent: ours.Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(socket, "getfqdn", lambda name="": asked.append(name) or name)
    agent._construct_event("STARTED", elastic.EventSource.AGENT)
    assert asked, "torch does not ask any more: _leave_dns_alone can go"
    monkeypatch.setattr(elastic, "_get_fq_hostname", elastic._get_fq_hostname)  # as it was, afterwards
    ours._leave_dns_alone()
    asked.clear()
    agent._construct_event("STARTED", elastic.EventSource.AGENT)
    assert not asked
