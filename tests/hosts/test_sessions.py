"""Ranks that stay on several hosts: the tests of a session on one machine, and what only hosts have."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

import nbddp
from tests.hosts.rig import Rig
from tests.hosts.test_lost import Login
from tests.support import wait_until
from tests.test_session import (  # noqa: F401 - collected here, too, with the session of this module
    quiet,
    test_a_call_may_open_and_destroy_the_group_as_scripts_do,
    test_a_call_on_some_ranks,
    test_a_collective_of_all_in_a_call_on_some_ranks_is_named_and_stopped,
    test_a_failure_frees_the_others_and_the_next_call_works,
    test_a_failure_in_a_call_on_some_ranks_frees_the_others,
    test_a_large_tensor_goes_out_and_comes_back,
    test_a_model_that_differs_after_a_failure_is_told_and_sync_mends_it,
    test_an_interrupt_ends_the_call_and_the_session_goes_on,
    test_an_interrupt_while_nothing_runs_does_nothing_to_the_ranks,
    test_each_call_has_its_own_curves_output_and_steps,
    test_failures_in_ddp_leave_the_training_as_if_they_had_never_been,
    test_groups_of_the_users_are_named_as_void_after_a_failure,
    test_metrics_are_combined_over_ranks_and_background_calls_are_shown_as_running,
    test_names_are_set_read_listed_and_freed,
    test_values_that_differ_between_ranks_are_told_and_synced,
    total,
)

pytestmark = pytest.mark.slow

SHARES = {"gpu1": 1, "gpu2": 2}


@pytest.fixture(scope="module")
def shared(rig: Rig) -> Iterator[nbddp.Session]:
    """One session for all tests that leave its ranks as they were."""
    with (
        nbddp.cluster(["gpu1", "gpu2"], launcher=rig.ssh, heartbeat=15.0) as hosts,
        nbddp.session(hosts=hosts, nprocs=SHARES, device="cpu") as session,
    ):
        yield session


@pytest.fixture
def session(shared: nbddp.Session, rig: Rig) -> nbddp.Session:
    shared.reset()
    return shared


def where() -> tuple[str, int, int]:
    return os.uname().nodename, nbddp.rank(), os.getpid()


def test_a_session_on_two_hosts_keeps_its_ranks_there(session: nbddp.Session) -> None:
    first, second = quiet(session, where), quiet(session, where)
    assert first.values == second.values
    assert [rank for _, rank, _ in first.values] == [0, 1, 2]
    assert len({name for name, _, _ in first.values}) == 2
    assert session.summary == "3 ranks on 2 hosts · gloo"


def test_all_output_and_metrics_of_a_call_are_in_its_run(session: nbddp.Session) -> None:
    def flood(points: int) -> None:
        for i in range(points):
            nbddp.log(i=float(i))
            print("x" * 1000)

    for _ in range(2):
        run = quiet(session, flood, 3000)
        assert run.history["i"].values.tolist() == [float(i) for i in range(3000)]
        assert [run.logs(rank).count("x" * 1000 + "\n") for rank in range(3)] == [3000] * 3


def test_a_rank_that_dies_on_a_host_is_named_and_restarted(cluster: Login) -> None:
    with nbddp.session(hosts=cluster(), nprocs=1, device="cpu") as session:
        session["x"] = torch.ones(3)
        with pytest.raises(nbddp.RankDied, match="rank 1 of 2") as raised:
            quiet(session, lambda: nbddp.rank() and os.kill(os.getpid(), signal.SIGKILL))
        assert "gpu2" in str(raised.value)
        with pytest.raises(nbddp.LaunchError, match="rank 1 is lost"):
            quiet(session, total)
        assert session["x"].tolist() == [1.0] * 3
        before = session.pids
        session.restart(names=["x"])
        assert session.pids[0] == before[0]
        assert session.pids[1] != before[1]
        assert quiet(session, total).values == [2.0] * 2
        assert [value.tolist() for value in session.values("x")] == [[1.0] * 3] * 2


def test_a_lost_host_is_named_and_the_names_of_the_others_can_be_pulled(cluster: Login, rig: Rig) -> None:
    with nbddp.session(hosts=cluster(), nprocs=1, device="cpu") as session:
        session["x"] = torch.ones(3)
        going = quiet(session, time.sleep, 100, wait=False)
        wait_until(lambda: going._viewable.status().phase == "running", 20)
        rig.hosts["gpu2"].agent().kill()
        with pytest.raises(nbddp.HostLost, match="gpu2"):
            going.wait(30)
        assert session["x"].tolist() == [1.0] * 3
        with pytest.raises(nbddp.LaunchError, match="rank 1 is lost: .*connection"):
            quiet(session, total)
        with pytest.raises(nbddp.LaunchError, match="open another one"):
            session.restart()


def test_stop_during_a_long_upload_leaves_the_session_usable(cluster: Login, rig: Rig) -> None:
    with nbddp.session(hosts=cluster(), nprocs=1, device="cpu") as session:
        rig.limit("gpu2", "20mbit")
        data = torch.rand(20 << 20)
        try:
            going = quiet(session, lambda x: x.sum(), data, wait=False)
            wait_until(lambda: "sending" in going._viewable.status().transfers, 20)
            began = time.monotonic()
            going.stop()
            assert time.monotonic() - began < 20  # all of it takes 32 s
        finally:
            rig.limit("gpu2")
        assert quiet(session, total).values == [2.0] * 2


def test_two_sessions_on_one_cluster_are_refused_and_the_hosts_are_free_after_the_first(cluster: Login) -> None:
    hosts = cluster()
    with nbddp.session(hosts=hosts, nprocs=1, device="cpu") as session:
        with pytest.raises(nbddp.LaunchError, match="these hosts are busy with session"):
            nbddp.session(hosts=hosts, nprocs=1, device="cpu")
        assert quiet(session, total).values == [2.0] * 2
    assert hosts.run(total, nprocs=1, device="cpu", show=False).values == [2.0] * 2
    with nbddp.session(hosts=hosts, nprocs=1, device="cpu") as session:
        assert quiet(session, total).values == [2.0] * 2


def test_a_closed_session_leaves_nothing_on_the_hosts(cluster: Login, rig: Rig) -> None:
    with nbddp.session(hosts=cluster(), nprocs=2, device="cpu"):
        assert len(rig.hosts["gpu1"].ranks()) == 2
    wait_until(lambda: not rig.hosts["gpu1"].ranks() and not rig.hosts["gpu2"].ranks(), 10)
